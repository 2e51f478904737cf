"""The five examples of ONNX proposal 0006, and their kin: messages both ways, and shards."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.mesh import make_mesh
from isoshard.onnx_bridge import from_sharding_spec, to_sharding_spec
from tests.onnx_bridge.models import spec

X = np.array([[1, 2], [3, 4]], np.int32)
AXIS_0 = "sharded_dim { axis: 0 simple_sharding { num_shards: 2 } }"
AXIS_1 = "sharded_dim { axis: 1 simple_sharding { num_shards: 2 } }"
PAIRS = "index_to_device_group_map { key: -1 value: [0, 1] } "
MIXED = PAIRS + "index_to_device_group_map { key: -2 value: [2, 3] } "

# message, mesh that is made, spec, what each device holds
SEED = {
    "axis 0": ("device: [0, 1] " + AXIS_0, (2,), P("d0"), [[[1, 2]], [[3, 4]]]),
    "axis 1": ("device: [0, 1] " + AXIS_1, (2,), P(None, "d0"), [[[1], [3]], [[2], [4]]]),
    "both axes": ("device: [0, 1, 2, 3] " + AXIS_0 + AXIS_1, (2, 2), P("d0", "d1"),
     [[[1]], [[2]], [[3]], [[4]]]),
    "replicated": ("device: [-1] " + PAIRS, (2,), P(), [[[1, 2], [3, 4]]] * 2),
    "mixed": ("device: [-1, -2] " + MIXED + AXIS_0, (2, 2), P("d0"),
     [[[1, 2]], [[1, 2]], [[3, 4]], [[3, 4]]]),
}  # fmt: skip


def shards(sharding, x):
    """What each device holds, by position in the file's numbering (that of jax.devices())."""
    placed = jax.device_put(x, sharding)
    held = {shard.device.id: shard.data.tolist() for shard in placed.addressable_shards}
    return [held[device] for device in sorted(held)]


@pytest.mark.parametrize("name", SEED)
def test_a_message_is_read(name):
    text, shape, expected, held = SEED[name]
    found = from_sharding_spec(spec('tensor_name: "x" ' + text), (2, 2))
    assert found.mesh.devices.shape == shape
    assert found.spec == expected
    assert shards(found, X) == held


@pytest.mark.parametrize("name", SEED)
def test_the_same_message_is_written(name):
    text, shape, written, _ = SEED[name]
    mesh = make_mesh(shape, [f"d{axis}" for axis in range(len(shape))])
    expected = spec('tensor_name: "x" ' + text)
    assert to_sharding_spec(NamedSharding(mesh, written), "x", (None, None)) == expected


STRIDED = (
    "index_to_device_group_map { key: -1 value: [0, 2] } "
    "index_to_device_group_map { key: -2 value: [1, 3] } "
)


@pytest.mark.parametrize(("text", "shape", "expected"), [
    ("device: [-1, -2] " + STRIDED + AXIS_1, (2, 2), P(None, "d1")),
    ("device: [0, 2, 1, 3] " + AXIS_0 + AXIS_1, (2, 2), P("d1", "d0")),
    ("device: [0, 2, 1, 3] sharded_dim { axis: 0 simple_sharding { num_shards: 4 } }", (2, 2),
     P(("d1", "d0"))),
    ("device: [3, 1, 2, 0] sharded_dim { axis: 0 simple_sharding { num_shards: 4 } }", (4,),
     P("d0")),
    ("device: [0, 1, 2, 3] " + AXIS_1 + AXIS_0, (2, 2), P("d1", "d0")),
    ("device: [5, 7] " + AXIS_0, (2,), P("d0")),
])  # fmt: skip
def test_other_orders_of_devices(text, shape, expected):
    found = from_sharding_spec(spec(text), (4, 4))
    assert (found.mesh.devices.shape, found.spec) == (shape, expected)


def test_listed_order_wins_and_is_written_in_axis_order():
    """Axis 1 listed first is the outer one: device 1 holds the lower left corner."""
    listed = from_sharding_spec(spec("device: [0, 1, 2, 3] " + AXIS_1 + AXIS_0), (2, 2))
    assert shards(listed, X) == [[[1]], [[3]], [[2]], [[4]]]
    again = to_sharding_spec(listed, "x", (None, None))
    assert [dim.axis for dim in again.sharded_dim] == [0, 1]
    assert list(again.device) == [0, 2, 1, 3]


def test_two_mesh_axes_on_one_tensor_axis_are_one_number_of_shards():
    """Two numbers would mean an axis that was fused of two."""
    mesh = make_mesh((2, 2), ("a", "b"))
    proto = to_sharding_spec(NamedSharding(mesh, P(("a", "b"))), "x", (8,))
    (only,) = proto.sharded_dim[0].simple_sharding
    assert only.num_shards == 4
    assert from_sharding_spec(proto, (8,), mesh).spec == P(("a", "b"))
