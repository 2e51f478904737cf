"""Layouts over a mesh: parts of it, uneven axes, orders that no axis has, errors."""

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import DeviceError, ShardingError
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.layout.tiles import Tiles
from isoshard.onnx_bridge import AnnotationError, from_sharding_spec, to_sharding_spec
from isoshard.onnx_bridge.layouts.meshes import fitting_mesh
from tests.onnx_bridge.models import spec

FOUR = "sharded_dim { axis: 0 simple_sharding { num_shards: 4 } }"


def test_a_part_of_a_mesh():
    mesh = make_mesh((2, 4), ("stage", "model"))
    found = from_sharding_spec(spec("device: [4, 5, 6, 7] " + FOUR), (8,), mesh)
    assert (dict(found.mesh.shape), found.spec) == ({"model": 4}, P("model"))
    assert list(found.mesh.devices.flat) == list(mesh.devices[1])


def test_devices_that_are_no_part():
    text = 'tensor_name: "w" device: [0, 1, 2, 4] ' + FOUR
    with pytest.raises(AnnotationError, match=r"tensor 'w': devices \[0, 1, 2, 4\] are no submesh"):
        from_sharding_spec(spec(text), (8,), make_mesh((2, 4), ("x", "y")))


def test_an_order_that_the_mesh_has_not():
    text = 'tensor_name: "w" device: [3, 1, 2, 0] ' + FOUR
    with pytest.raises(AnnotationError, match=r"'w': blocks \(4,\).*follow no order of the mesh"):
        from_sharding_spec(spec(text), (8,), make_mesh((2, 2), ("x", "y")))


def test_uneven_axes_are_an_error_or_left_whole():
    mesh = make_mesh((2, 2), ("x", "y"))
    text = spec(
        'tensor_name: "w" device: [0, 1, 2, 3] '
        "sharded_dim { axis: 0 simple_sharding { num_shards: 2 } } "
        "sharded_dim { axis: 1 simple_sharding { num_shards: 2 } }"
    )
    with pytest.raises(AnnotationError, match=r"'w', axis 1: its size 3 is no multiple of its 2"):
        from_sharding_spec(text, (4, 3), mesh)
    assert from_sharding_spec(text, (4, 3), mesh, uneven="replicate").spec == P("x")


def test_too_few_devices():
    with pytest.raises(DeviceError, match=r"name device 63, there are 8.*simulate_devices\(64\)"):
        from_sharding_spec(spec("device: [63]"), (4,))


def test_layouts_that_exclude_each_other():
    strides = [Tiles([[0, 1], [2, 3], [4, 5]]), Tiles([[0, 1, 2], [3, 4, 5]])]
    with pytest.raises(AnnotationError, match="no mesh of 6 devices has axes"):
        fitting_mesh(strides, range(6), jax.devices()[:6])


def test_many_layouts_make_one_mesh():
    strides = [Tiles([[0, 1, 2, 3], [4, 5, 6, 7]]), Tiles([[0, 2, 4, 6], [1, 3, 5, 7]])]
    found = fitting_mesh(strides, range(8), jax.devices())
    assert dict(found.mesh.shape) == {"d0": 2, "d1": 2, "d2": 2}
    assert [one.to_spec(found.mesh) for one in strides] == [P("d0"), P("d2")]


@pytest.mark.parametrize(("partition", "shape", "match"), [
    (P("x", "y"), (4,), "2 entries for a tensor of rank 1"),
    (P(P.UNCONSTRAINED), (4,), "leaves the axis open"),
    (P(unreduced={"x"}), (4,), "unreduced"),
])  # fmt: skip
def test_what_onnx_has_no_words_for(partition, shape, match):
    sharding = NamedSharding(explicit() if partition.unreduced else auto(), partition)
    with pytest.raises(AnnotationError, match=rf"^tensor 'w': .*{match}"):
        to_sharding_spec(sharding, "w", shape)


def auto():
    return make_mesh((2, 2), ("x", "y"), axis_types=AxisType.Auto)  # which alone can be left open


def explicit():
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)


def test_an_abstract_mesh_has_no_devices():
    with pytest.raises(ShardingError, match="abstract mesh"):
        to_sharding_spec(NamedSharding(AbstractMesh((2,), ("x",)), P("x")), "w", (4,))
