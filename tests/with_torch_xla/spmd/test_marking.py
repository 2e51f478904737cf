import itertools

import jax
import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import (
    DeviceError,
    ShardingError,
    SpecError,
    UnevenError,
    UnrepresentableError,
)
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.layout.op_sharding import to_op_sharding
from isoshard.core.layout.spec import named_sharding, same_layout
from isoshard.core.layout.tiles import Tiles
from isoshard.core.transfer.device_put import sharding_of

ROWS = "{devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate}"
CUBE = (2, 2, 2)


def annotation(tensor):
    return torch_xla._XLAC._get_xla_sharding_spec(tensor)


def on_xla(*shape, dtype=torch.float32):
    return torch.arange(int(np.prod(shape))).reshape(shape).to(dtype).to("xla")


@pytest.fixture
def global_mesh():
    """Puts torch_xla's global mesh back."""
    before = xs.get_global_mesh()
    yield xs.set_global_mesh
    xs.set_global_mesh(before)


def every_spec(axes, rank):
    """Every spec of at most two mesh axes for each tensor axis."""
    groups = [(), *((a,) for a in axes), *itertools.permutations(axes, 2)]
    for entries in itertools.product(groups, repeat=rank):
        used = [axis for group in entries for axis in group]
        if len(used) == len(set(used)):
            yield tuple(g if len(g) > 1 else g[0] if g else None for g in entries)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_every_spec_is_annotated_as_torch_xla_annotates_it(backend, rank):
    mesh = make_mesh(CUBE, ("a", "b", "c"))
    theirs = xs.Mesh(np.arange(8), CUBE, ("a", "b", "c"))
    specs = list(every_spec("abc", rank))
    assert len(specs) >= 10
    for spec in specs:
        ours, wanted = on_xla(*[4] * rank), on_xla(*[4] * rank)
        assert backend.mark(ours, mesh, P(*spec)) is ours
        xs.mark_sharding(wanted, theirs, spec)
        assert annotation(ours) == annotation(wanted), spec
        sharding = named_sharding(spec, mesh, rank)
        assert to_op_sharding(Tiles.from_sharding(sharding, rank)) == annotation(ours), spec
        for read in (backend.sharding_of(ours), backend.sharding_of(wanted, mesh)):
            assert read.mesh == mesh
            assert same_layout(read, sharding, rank), spec


@pytest.mark.parametrize(
    "spec",
    [
        P("x"),
        P("x", None),
        ("x", None),
        (0, None),
        ["x", None],
        (("x",), None),
        ROWS,
        "{devices=[2,1,4]<=[8] last_tile_dim_replicate}",
    ],
    ids=repr,
)
def test_every_spelling_of_a_spec_is_taken(backend, mesh, spec):
    tensor = backend.mark(on_xla(8, 8), mesh, spec)
    assert annotation(tensor) == ROWS
    assert backend.sharding_of(tensor) == NamedSharding(mesh, P("x"))


def test_a_sharding_is_mesh_and_spec_in_one(backend, mesh):
    tensor = backend.mark(on_xla(8, 8), NamedSharding(mesh, P("x")))
    assert annotation(tensor) == ROWS
    with pytest.raises(SpecError, match=r"has its spec, P\('x',\); .* one too many"):
        backend.mark(on_xla(8, 8), NamedSharding(mesh, P("x")), P("x"))


def test_without_a_spec_a_tensor_is_whole(backend, mesh):
    tensor = backend.mark(on_xla(8, 8), mesh)
    assert annotation(tensor) == "{replicated}"
    assert backend.sharding_of(tensor) == NamedSharding(mesh, P())


def test_a_mesh_of_torch_xla_serves_as_well(backend):
    theirs = xs.Mesh(np.arange(8), (2, 4), ("x", "y"))
    tensor = backend.mark(on_xla(8, 8), theirs, ("x", None))
    assert annotation(tensor) == ROWS
    assert backend.sharding_of(tensor).mesh == backend.mesh_from_torch_xla(theirs)


def test_devices_in_another_order_are_told_apart(backend):
    order = [3, 1, 0, 2, 7, 6, 5, 4]
    mesh = make_mesh((2, 4), ("x", "y"), devices=[jax.devices()[i] for i in order])
    wanted = on_xla(8, 8)
    xs.mark_sharding(wanted, xs.Mesh(np.array(order), (2, 4), ("x", "y")), ("y", None))
    tensor = backend.mark(on_xla(8, 8), mesh, P("y"))
    assert annotation(tensor) == annotation(wanted)
    assert annotation(tensor).startswith("{devices=[4,1,2]3,7,1,6")
    assert backend.sharding_of(tensor) == NamedSharding(mesh, P("y"))


def test_placements_of_the_wrapper_are_right(backend, mesh):
    from torch.distributed.tensor import Replicate, Shard

    tensor = backend.mark(xs.XLAShardedTensor(on_xla(8, 8)), mesh, P(None, "y"))
    assert tensor.placements == (Replicate(), Shard(1))
    assert (
        annotation(tensor.global_tensor)
        == "{devices=[1,4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}"
    )
    assert backend.sharding_of(tensor) == NamedSharding(mesh, P(None, "y"))


def test_parameters_and_their_results(backend, mesh):
    layer = torch.nn.Linear(8, 16).to("xla")
    backend.mark(layer.weight, mesh, P("y", "x"))
    inputs = backend.mark(on_xla(4, 8), mesh, P("x"))
    layer(inputs).sum().backward()
    torch_xla.sync()
    assert backend.sharding_of(layer.weight) == NamedSharding(mesh, P("y", "x"))
    assert isinstance(layer.weight, torch.nn.Parameter)
    assert layer.weight.grad.cpu().allclose(inputs.cpu().sum(0).expand(16, 8))


def test_the_layout_of_a_result_is_read_by_executing_it(backend, mesh):
    tensor = backend.mark(on_xla(8, 8), mesh, P("x", "y"))
    result = tensor * 2
    assert annotation(result) == ""
    assert backend.sharding_of(result, mesh) == NamedSharding(mesh, P("x", "y"))


def test_a_result_is_named_by_the_global_mesh(backend, mesh, global_mesh):
    global_mesh(backend.mesh_to_torch_xla(mesh))
    result = backend.mark(on_xla(8, 8), mesh, P("y")) + 1
    assert backend.sharding_of(result) == NamedSharding(mesh, P("y"))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_layout_without_a_mesh_gets_one(backend, rank):
    theirs = xs.Mesh(np.arange(8), CUBE, ("a", "b", "c"))
    mesh = backend.mesh_from_torch_xla(theirs)
    for spec in every_spec("abc", rank):
        tensor = on_xla(*[4] * rank)
        xs.mark_sharding(tensor, theirs, spec)
        found = backend.sharding_of(tensor)
        assert same_layout(found, named_sharding(spec, mesh, rank), rank), spec
        assert list(found.mesh.devices.flat) == jax.devices(), spec


@pytest.mark.parametrize(
    ("spec", "shape", "read"),
    [
        (P("x", "y"), {"dim0": 2, "dim1": 4}, P("dim0", "dim1")),
        (P(None, "y"), {"replica": 2, "dim1": 4}, P(None, "dim1")),
        (P(("y", "x")), {"dim0_1": 2, "dim0_0": 4}, P(("dim0_0", "dim0_1"))),
        (P(), {"replica": 8}, P()),
    ],
)
def test_its_axes_are_named_after_the_tensors(backend, mesh, spec, shape, read):
    tensor = on_xla(8, 8)
    xs.mark_sharding(tensor, backend.mesh_to_torch_xla(mesh), (*spec, None, None)[:2])
    found = backend.sharding_of(tensor)
    assert dict(found.mesh.shape) == shape
    assert found.spec == read


def test_devices_in_no_regular_order_make_a_mesh_in_that_order(backend):
    order = [3, 1, 0, 2, 7, 6, 5, 4]
    tensor = on_xla(8, 8)
    xs.mark_sharding(tensor, xs.Mesh(np.array(order), (4, 2), ("x", "y")), (None, ("x", "y")))
    found = backend.sharding_of(tensor)
    assert found.spec == P(None, "dim1")
    assert [jax.devices().index(device) for device in found.mesh.devices.flat] == order


def test_a_mesh_that_cannot_name_a_layout_is_refused_if_asked_for(backend, mesh, global_mesh):
    tensor = backend.mark(on_xla(8, 8), mesh, P("y"))
    line = make_mesh((8,), ("all",))
    with pytest.raises(UnrepresentableError, match="follow no order of the mesh axes 'all'"):
        backend.sharding_of(tensor, line)
    global_mesh(backend.mesh_to_torch_xla(line))
    assert dict(backend.sharding_of(tensor + 0).mesh.shape) == {"replica": 2, "dim0": 4}


def test_data_nobody_annotated_is_whole(backend, mesh):
    assert backend.sharding_of(on_xla(8, 8), mesh) == NamedSharding(mesh, P())


def test_the_same_mark_again_changes_nothing(backend, mesh):
    tensor = backend.mark(on_xla(8, 8), mesh, P("x"))
    backend.mark(tensor, mesh, (0, None))
    assert annotation(tensor) == ROWS


def test_another_mark_is_refused_until_cleared(backend, mesh):
    tensor = backend.mark(on_xla(8, 8), mesh, P("x"))
    with pytest.raises(ShardingError, match=r"annotated \{devices=\[2,1,4\].*clear_sharding"):
        backend.mark(tensor, mesh, P("y"))
    assert annotation(tensor) == ROWS
    xs.clear_sharding(tensor)
    assert backend.sharding_of(backend.mark(tensor, mesh, P("y"))).spec == P("y")


@pytest.mark.parametrize(
    ("shape", "spec", "error", "message"),
    [
        ((8, 8), P("z"), SpecError, "no mesh axis is called 'z'"),
        ((8,), P("x", "y"), SpecError, "2 entries for a tensor of rank 1"),
        ((8, 8), ("x", "x"), SpecError, "'x'"),
        ((7, 8), P("x"), UnevenError, "no multiple of its 2 shards"),
        ((8, 8), "{manual}", UnrepresentableError, "is no layout"),
    ],
)
def test_specs_that_do_not_fit_leave_the_tensor_alone(backend, mesh, shape, spec, error, message):
    tensor = on_xla(*shape)
    with pytest.raises(error, match=message):
        backend.mark(tensor, mesh, spec)
    assert annotation(tensor) == ""


def test_what_is_not_on_the_device_is_refused(backend, mesh):
    with pytest.raises(ShardingError, match=r"this Tensor is on cpu. Move it with t.to\('xla'\)"):
        backend.mark(torch.ones(8, 8), mesh, P("x"))
    with pytest.raises(ShardingError, match="this ndarray is no tensor"):
        backend.sharding_of(np.ones(3))


def test_a_mesh_of_fewer_devices_is_refused(backend):
    with pytest.raises(DeviceError, match="takes all of its 8 devices"):
        backend.mark(on_xla(8, 8), make_mesh((2, 2), ("x", "y")), P("x"))


def test_the_verb_of_core_reads_it_too(backend, mesh):
    tensor = backend.mark(on_xla(8, 8), mesh, P("x"))
    assert sharding_of(tensor) == NamedSharding(mesh, P("x"))
    tree = sharding_of({"a": [tensor]})
    assert tree == {"a": [NamedSharding(mesh, P("x"))]}
