import jax
import numpy as np
import pytest
import torch_xla.distributed.spmd as xs

from isoshard.core.errors import DeviceError
from isoshard.core.layout.mesh import make_mesh


@pytest.mark.parametrize("shape", [(8,), (2, 4), (8, 1), (2, 2, 2)])
def test_a_mesh_is_the_same_grid_for_both(backend, shape):
    mesh = make_mesh(shape, [f"axis{i}" for i in range(len(shape))])
    theirs = backend.mesh_to_torch_xla(mesh)
    assert isinstance(theirs, xs.Mesh)
    assert dict(theirs.shape()) == dict(mesh.shape)
    assert theirs.get_logical_mesh().tolist() == np.arange(8).reshape(shape).tolist()
    assert backend.mesh_from_torch_xla(theirs) == mesh


def test_devices_keep_their_order(backend):
    order = [3, 1, 0, 2, 7, 6, 5, 4]
    theirs = xs.Mesh(np.array(order), (4, 2), ("x", "y"))
    mesh = backend.mesh_from_torch_xla(theirs)
    assert list(mesh.devices.flat) == [jax.devices()[i] for i in order]
    assert backend.mesh_to_torch_xla(mesh).device_ids.tolist() == order


def test_equal_meshes_are_one_object(backend):
    made = [backend.mesh_to_torch_xla(make_mesh((2, 4), ("x", "y"))) for _ in range(2)]
    assert made[0] is made[1]


def test_axes_without_names_are_numbered(backend):
    mesh = backend.mesh_from_torch_xla(xs.Mesh(np.arange(8), (4, 2)))
    assert mesh.axis_names == ("0", "1")
    assert {kind.name for kind in mesh.axis_types} == {"Auto"}


def test_fewer_devices_are_refused(backend):
    with pytest.raises(DeviceError, match="takes all of its 8 devices, and this one has 4"):
        backend.mesh_to_torch_xla(make_mesh((4,), ("x",)))


def test_explicit_axes_are_taken(backend):
    mesh = backend.mesh_to_torch_xla(jax.make_mesh((8,), ("x",)))
    assert tuple(mesh.mesh_shape) == (8,) and tuple(mesh.axis_names) == ("x",)
