"""`DeviceMesh` of one process: shapes, parts, names, and what is refused."""

import copy
import pickle

import jax
import numpy as np
import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.core.errors import DeviceError, ShardingError
from isoshard.core.layout.mesh import make_mesh
from isoshard.torch_bridge.distributed import DeviceMesh, init_device_mesh
from isoshard.torch_bridge.distributed.device_mesh import current_mesh, device_mesh_of


@pytest.fixture
def mesh3():
    return init_device_mesh("jax", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))


def test_what_it_says_of_itself():
    mesh = DeviceMesh("jax", [[4, 5], [6, 7]], mesh_dim_names=("dp", "tp"))
    assert (mesh.ndim, mesh.shape, mesh.size(), mesh.size(0), mesh.numel()) == (2, (2, 2), 4, 2, 4)
    assert mesh.mesh.tolist() == [[4, 5], [6, 7]] and mesh.mesh.dtype == torch.int32
    assert mesh.mesh_dim_names == ("dp", "tp") and mesh.device_type == "jax"
    assert repr(mesh) == "DeviceMesh((dp=2, tp=2), 'jax')"
    assert [d.id for d in mesh.get_jax_mesh().devices.flat] == [4, 5, 6, 7]
    assert repr(init_device_mesh("jax", (4,))) == "DeviceMesh((4,), 'jax')"
    for grid in ([3, 1], (3, 1), np.array([3, 1]), torch.tensor([3, 1])):
        assert DeviceMesh("cpu", grid).mesh.tolist() == [3, 1]


def test_any_mesh_is_a_device_mesh():
    named = init_device_mesh("jax", (2, 4), mesh_dim_names=("x", "y"))
    assert device_mesh_of(named) is named
    assert device_mesh_of(xs.Mesh(range(8), (2, 4), ("x", "y"))) == named
    assert device_mesh_of(make_mesh((2, 4), ("x", "y"))) == named
    assert xs.Mesh(range(8), (2, 4)).device_type == "xla"
    with pytest.raises(TypeError, match=r"a mesh is a jax.sharding.Mesh"):
        device_mesh_of("cuda")
    theirs = torch.distributed.DeviceMesh("xla", torch.arange(8).view(2, 4))
    ours = device_mesh_of(theirs)
    assert ours == DeviceMesh("jax", torch.arange(8).view(2, 4))
    assert (ours.ndim, ours.shape) == (theirs.ndim, theirs.shape)
    assert (ours.size(), ours.size(1)) == (theirs.size(), theirs.size(1))
    assert torch.equal(ours.mesh, theirs.mesh)


def test_parts_remember_their_root(mesh3):
    tp = mesh3["tp"]
    assert tp.root is mesh3 and tp.root_axes == ((2,),) and tp.is_part()
    assert tp.shape == (2,) and tp.mesh.tolist() == [0, 1] and tp.mesh_dim_names == ("tp",)
    assert tp.get_jax_mesh() is mesh3.get_jax_mesh() and tp.axis_names(0) == ("tp",)
    two = mesh3["pp", "tp"]
    assert two.shape == (2, 2) and two.mesh.tolist() == [[0, 1], [4, 5]]
    assert two["tp"] == tp and hash(two["tp"]) == hash(tp) and tp != mesh3["dp"]
    assert mesh3["pp", "dp", "tp"] is mesh3 and not mesh3.is_part()
    assert repr(tp) == "DeviceMesh((tp=2), 'jax', of (pp=2, dp=2, tp=2))"
    with pytest.raises(KeyError, match=r"\['zz'\] names no dimension of"):
        mesh3["zz"]
    with pytest.raises(KeyError, match=r"keeps the order of the dimensions: \('dp', 'tp'\)"):
        mesh3["tp", "dp"]
    with pytest.raises(RuntimeError, match=r"no dimension names, so .* cannot be looked up"):
        init_device_mesh("jax", (8,))["x"]


def test_flattened(mesh3):
    flat = mesh3["pp", "dp"]._flatten()
    assert flat.shape == (4,) and flat.mesh_dim_names == ("pp_dp",)
    assert flat.axis_names(0) == ("pp", "dp") and mesh3["pp_dp"] == flat
    assert mesh3._flatten("all").size() == 8 and not mesh3["all"].is_part()
    for name in ("tp", "all"):
        with pytest.raises(ValueError, match=f"has a dimension '{name}' already"):
            mesh3["pp", "dp"]._flatten(name)
    with pytest.raises(RuntimeError, match="pass a name for the flattened dimension"):
        init_device_mesh("jax", (2, 4))._flatten()


def test_a_part_is_no_mesh_for_marks(mesh3):
    assert xs.mark_sharding(torch.ones(4).to("jax"), mesh3, ("dp",)).partition_spec == P("dp")
    with pytest.raises(ShardingError, match=r"sliced from another mesh.*pass mesh.root"):
        xs.xla_distribute_tensor(torch.ones(4), mesh3["tp"])


@pytest.mark.parametrize(
    ("kind", "shape", "names", "error", "message"),
    [
        ("jax", (3, 3), None, DeviceError, "needs 9 devices, there are 8"),
        ("cuda", (2, 4), None, ShardingError, r"type 'cuda' is not poss.*devices of type 'cpu'"),
        ("cpu:0", (2, 4), None, ShardingError, "without an index"),
        ("jax", (2, 4), ("x",), RuntimeError, "1 names .* for a mesh of 2 dimensions"),
        ("jax", (2, 4), ("x", "x"), RuntimeError, "must differ"),
    ],
)
def test_no_such_mesh(kind, shape, names, error, message):
    with pytest.raises(error, match=message):
        init_device_mesh(kind, shape, mesh_dim_names=names)


def test_what_one_process_does_not_have(mesh3):
    with pytest.raises(ShardingError, match="Device IDs must be unique"):
        DeviceMesh("jax", [0, 0])
    with pytest.raises(ShardingError, match="how processes communicate"):
        init_device_mesh("jax", (8,), backend_override={"x": "gloo"})
    of_a_rank = ("get_rank", "get_local_rank", "get_coordinate", "get_group", "get_all_groups")
    for name in (*of_a_rank, "from_group"):
        with pytest.raises(RuntimeError, match=rf"{name}\(\).*one process drives all"):
            getattr(mesh3, name)()


def test_the_current_mesh(mesh3):
    with pytest.raises(RuntimeError, match="no device mesh is passed and none is active"):
        current_mesh()
    with mesh3, mesh3["tp"] as inner:
        assert current_mesh() is inner
    with mesh3:
        assert current_mesh() is mesh3
    xs.set_global_mesh(xs.Mesh(range(8), (2, 2, 2), ("pp", "dp", "tp")))
    try:
        assert current_mesh() == mesh3
    finally:
        xs.set_global_mesh(None)


def test_copies_are_equal(mesh3):
    for mesh in (mesh3, mesh3["tp"], mesh3["pp", "dp"]._flatten("both")):
        for again in (copy.deepcopy(mesh), pickle.loads(pickle.dumps(mesh))):
            assert again == mesh and again.shape == mesh.shape and again.root == mesh3
            assert isinstance(again.get_jax_mesh(), jax.sharding.Mesh)
