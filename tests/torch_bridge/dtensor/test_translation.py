"""Placements and specs are one layout in two languages: exhaustively, against torch and JAX.

Every mesh of ranks 1 to 3 of up to 8 devices, every order of mesh axes on every tensor axis of
tensors of ranks 1 to 3, even sizes and sizes that `torch.chunk` cuts unevenly.
"""

import itertools
import math
import subprocess
import sys
import timeit

import jax
import numpy as np
import pytest
import torch
import torch.distributed as dist
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from isoshard import SpecError, Tiles, UnrepresentableError, make_mesh
from isoshard.core.errors import DeviceError, ShardingError
from isoshard.core.spec import same_layout
from isoshard.torch_bridge.dtensor import meshes
from isoshard.torch_bridge.dtensor.blocks import pieces
from isoshard.torch_bridge.dtensor.translation import (
    check_count,
    device_mesh_of,
    jax_mesh,
    layout_of,
    local_shape_and_offset,
    placements_of,
    placements_on,
    spec_of,
)

MESHES = [
    shape
    for rank in (1, 2, 3)
    for shape in itertools.product(range(1, 9), repeat=rank)
    if math.prod(shape) <= 8
]
UNEVEN = [(5, 3, 7), (1, 11, 2), (13, 0, 9)]


def torch_mesh(shape, rank=0, names=None, ranks=None):
    """A DeviceMesh that needs no process group, as process `rank` sees it."""
    ranks = torch.arange(math.prod(shape)) if ranks is None else torch.tensor(ranks)
    names = names or tuple("abc"[: len(shape)])
    grid = ranks.reshape(shape)
    return DeviceMesh("cpu", grid, mesh_dim_names=names, _init_backend=False, _rank=rank)


def orders(ndim, axes):
    """Every way to split tensor axes by mesh axes: per tensor axis some of them, in order."""
    for owner in itertools.product(range(-1, ndim), repeat=axes):
        split = [[a for a in range(axes) if owner[a] == dim] for dim in range(ndim)]
        yield from itertools.product(*map(itertools.permutations, split))


def in_words(order, shape):
    """The placements of such a way, by the rule FSDP2 and tensor parallelism follow."""
    found = [Replicate() for _ in shape]
    for dim, axes in enumerate(order):
        for at, axis in enumerate(axes):
            factor = math.prod(shape[other] for other in axes[:at] if other > axis)
            found[axis] = Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
    return tuple(found)


def all_placements(shape, ndim):
    return dict.fromkeys(in_words(order, shape) for order in orders(ndim, len(shape)))


def test_there_are_as_many_cases_as_there_should_be():
    assert len(MESHES) == 66
    assert len(list(orders(3, 3))) == 106
    assert len(all_placements((2, 2, 2), 3)) == 106
    strided = in_words(((2, 0, 1),), (2, 2, 2))
    assert strided == (*[_StridedShard(0, split_factor=2)] * 2, Shard(0))


@pytest.mark.parametrize("shape", MESHES, ids=lambda shape: "x".join(map(str, shape)))
def test_every_rank_holds_what_torch_says_and_the_same_blocks_in_jax(shape):
    count = math.prod(shape)
    views = [torch_mesh(shape, rank) for rank in range(count)]
    places = list(np.ndindex(*shape))
    for ndim in (1, 2, 3):
        sizes = [(2 * count, count, 3 * count)[:ndim], *(odd[:ndim] for odd in UNEVEN[: 5 - ndim])]
        for placements, size in itertools.product(all_placements(shape, ndim), sizes):
            held = [local_shape_and_offset(size, shape, placements, place) for place in places]
            for view, ours in zip(views, held, strict=True):
                assert compute_local_shape_and_global_offset(size, view, placements) == ours
            if size is not sizes[0] and any(isinstance(p, _StridedShard) for p in placements):
                continue  # below
            check_blocks(layout_of(placements, views[0], size), held)


def check_blocks(layout, held):
    """Compare what every device holds of the array with what it holds of the tensor."""
    index = layout.sharding.devices_indices_map(layout.padded)
    assert [device.id for device in index] == list(range(len(held)))
    for (local, offset), cut in zip(held, index.values(), strict=True):
        for dim, at in enumerate(cut):
            start, stop, _ = at.indices(layout.padded[dim])
            valid = layout.sizes[dim]
            if valid is None:
                assert (stop - start, start) == (local[dim], offset[dim])
                continue
            block = stop - start
            assert block == layout.block[dim] == max(valid)
            assert valid[start // block] == local[dim]
            assert not local[dim] or sum(valid[: start // block]) == offset[dim]
            assert sum(valid) == layout.shape[dim]


def test_uneven_strided_blocks_are_those_of_torch_or_refused():
    accepted = refused = 0
    for shape in [(2, 2), (2, 4), (3, 2), (2, 3), (2, 2, 2)]:
        mesh = torch_mesh(shape)
        strided = [p for p in all_placements(shape, 1) if any(map(is_strided, p))]
        for placements, extent in itertools.product(strided, range(1, 26)):
            places = list(np.ndindex(*shape))
            held = [local_shape_and_offset((extent,), shape, placements, at) for at in places]
            try:
                layout = layout_of(placements, mesh, (extent,))
            except UnrepresentableError as error:
                assert "pieces that are not consecutive" in str(error)
                refused += 1
            else:
                check_blocks(layout, held)
                accepted += 1
    assert accepted > 10 * refused > 0


def is_strided(placement):
    return isinstance(placement, _StridedShard)


def test_fsdp_over_tensor_parallel_with_a_block_in_two_pieces():
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    assert pieces(13, [(3, 2, 2), (2, 0, 1)]) == [(6, 7), (11, 12)]
    with pytest.raises(UnrepresentableError, match=r"size 13.*\[\(6, 7\), \(11, 12\)\].*of 6"):
        layout_of(placements, torch_mesh((3, 2)), (13,))


# Factors that no order of mesh axes has: the pieces are torch's all the same.
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2), (3, 2), (2, 2, 2)])
@pytest.mark.parametrize("extent", [1, 7, 12, 13, 24])
def test_any_split_factor_cuts_as_torch_does(shape, extent):
    choices = [Replicate(), Shard(0), *(_StridedShard(0, split_factor=n) for n in (2, 3, 5))]
    views = [(torch_mesh(shape, rank), place) for rank, place in enumerate(np.ndindex(*shape))]
    for placements in itertools.product(choices, repeat=len(shape)):
        for view, place in views:
            want = compute_local_shape_and_global_offset((extent,), view, placements)
            assert local_shape_and_offset((extent,), shape, placements, place) == want


@pytest.mark.parametrize("shape", MESHES, ids=lambda shape: "x".join(map(str, shape)))
def test_round_trips_are_identities(shape):
    mesh = torch_mesh(shape)
    names = mesh.mesh_dim_names
    for ndim in (1, 2, 3):
        size = (math.prod(shape),) * ndim
        for placements in all_placements(shape, ndim):
            assert placements_of(layout_of(placements, mesh, size).sharding) == placements
        for order in orders(ndim, len(shape)):
            entries = [tuple(names[axis] for axis in axes) or None for axes in order]
            sharding = NamedSharding(jax_mesh(mesh), P(*entries))
            again = layout_of(placements_of(sharding), mesh, size).sharding
            assert same_layout(again, sharding, ndim)
            if 1 not in shape:  # an axis of one device splits nothing: its place is not kept
                assert again.is_equivalent_to(sharding, ndim)
                spec = spec_of(placements_of(sharding), ndim, shape)
                assert spec == tuple(
                    (axes if len(axes) > 1 else (*axes, None)[0]) for axes in order
                )


def test_orders_by_name():
    mesh = torch_mesh((2, 4), names=("dp", "tp"))
    fsdp = (_StridedShard(0, split_factor=4), Shard(0))
    assert layout_of(fsdp, mesh, (8, 2)).sharding.spec == P(("tp", "dp"))
    assert layout_of((Shard(-1), Shard(-1)), mesh, (8, 8)).sharding.spec == P(None, ("dp", "tp"))
    assert spec_of((Shard(-1), Replicate()), 2) == (None, 0)
    lonely = torch_mesh((1, 8))  # an axis of one device may have any factor
    assert layout_of((_StridedShard(0, split_factor=3), Shard(0)), lonely, (8,)).is_even


@pytest.mark.parametrize(
    ("rows", "shape", "placements"),
    [
        (rows, shape, placements)
        for rows in (5, 8)
        for shape, placements in [
            ((4,), (Shard(0),)),
            ((2, 2), (Shard(0), Shard(0))),
            ((2, 2), (Replicate(), Shard(0))),
            ((2, 2), (Shard(1), Shard(0))),
        ]
    ]
    + [(8, (2, 2), (_StridedShard(0, split_factor=2), Shard(0)))],
)
def test_the_elements_are_where_dtensor_puts_them(rows, shape, placements):
    """Real DTensors of four ranks in one process, beside the blocks of our sharding."""
    whole = torch.arange(2.0 * rows).reshape(rows, 2)
    dist.init_process_group("fake", rank=0, world_size=4)
    try:
        with LocalTensorMode(4):
            mesh = init_device_mesh("cpu", shape)
            same = torch.arange(2.0 * rows).reshape(rows, 2)  # every rank's own
            local = distribute_tensor(same, mesh, placements).to_local()._local_tensors
    finally:
        dist.destroy_process_group()
    layout = layout_of(placements, torch_mesh(shape), (rows, 2))
    cuts = layout.sharding.devices_indices_map(layout.padded).values()
    for rank, (place, cut) in enumerate(zip(np.ndindex(*shape), cuts, strict=True)):
        size, offset = local_shape_and_offset((rows, 2), shape, placements, place)
        here = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
        assert torch.equal(local[rank], whole[here])
        if layout.is_even:
            assert torch.equal(local[rank], whole[cut])


# --- Partial -------------------------------------------------------------------------------------


def test_partial_is_an_unreduced_axis_and_jax_takes_the_sum():
    mesh = torch_mesh((2, 4), names=("dp", "tp"))
    layout = layout_of((Shard(0), Partial()), mesh, (4, 3))
    sharding = layout.sharding
    assert sharding.spec == P("dp", unreduced={"tp"})
    assert set(sharding.mesh.axis_types) == {AxisType.Explicit}
    assert placements_of(sharding) == (Shard(0), Partial("sum"))
    assert layout_of((Shard(0), Replicate()), mesh, (4, 3)).sharding.mesh.are_all_axes_auto
    local = np.random.default_rng(0).normal(size=(8, 2, 3)).astype(np.float32)
    array = jax.make_array_from_single_device_arrays(
        layout.shape,
        sharding,
        [jax.device_put(x, d) for x, d in zip(local, sharding.mesh.devices.flat, strict=True)],
    )
    total = jax.sharding.reshard(array, NamedSharding(sharding.mesh, P("dp")))
    np.testing.assert_allclose(total, local.reshape(2, 4, 2, 3).sum(1).reshape(4, 3), rtol=1e-5)


def test_several_partial_axes_uneven_and_of_one_device():
    mesh = torch_mesh((2, 1, 4))
    layout = layout_of((Partial(), Partial(), Shard(0)), mesh, (5,))
    assert layout.sharding.spec == P("c", unreduced={"a", "b"})
    assert layout.sizes == ((2, 2, 1, 0),) and layout.padded == (8,)
    assert placements_of(layout.sharding) == (Partial(), Partial(), Shard(0))


@pytest.mark.parametrize("kind", ["avg", "min", "max", "product", "band", "bor", "bxor"])
def test_other_partials_have_no_word_in_jax(kind):
    with pytest.raises(UnrepresentableError, match=rf"mesh axis 'tp'.*{kind}.*sums still to be"):
        layout_of((Shard(0), Partial(kind)), torch_mesh((2, 4), names=("dp", "tp")), (8,))


class MaskedPartial(Partial):
    """As torch's own for embeddings: a sum, and more to do after it."""


def test_a_kind_of_partial_is_no_plain_sum():
    assert MaskedPartial().reduce_op == "sum"
    with pytest.raises(UnrepresentableError, match=r"mesh axis 'a'.*sums still to be taken"):
        layout_of((MaskedPartial(),), torch_mesh((4,)), (8,))


def test_reduced_axes_are_replicated():
    explicit = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"), (AxisType.Explicit,) * 2)
    assert placements_of(NamedSharding(explicit, P("x", reduced={"y"}))) == (Shard(0), Replicate())


# --- another mesh of the same devices ------------------------------------------------------------


def test_placements_on_every_other_mesh_of_eight():
    said = 0
    eights = [shape for shape in MESHES if math.prod(shape) == 8]
    for here, there in itertools.product(eights, repeat=2):
        ranks = np.arange(8).reshape(there[::-1]).transpose().ravel().tolist()  # column by column
        other = torch_mesh(there, ranks=ranks)
        for placements in all_placements(here, 1):
            sharding = layout_of(placements, torch_mesh(here), (8,)).sharding
            try:
                found = placements_on(sharding, other, 1)
            except UnrepresentableError:
                assert not any(
                    same_map(layout_of(p, other, (8,)).sharding, sharding)
                    for p in all_placements(there, 1)
                )
                continue
            said += 1
            assert same_map(layout_of(found, other, (8,)).sharding, sharding)
    assert said > 1000


def same_map(a, b):
    return a.devices_indices_map((8,)) == b.devices_indices_map((8,))


def test_partial_on_another_mesh():
    mesh = torch_mesh((2, 2, 2))
    sharding = layout_of((Partial(), Shard(0), Partial()), mesh, (8,)).sharding
    turned = torch_mesh((2, 4), ranks=[0, 1, 4, 5, 2, 3, 6, 7])
    assert placements_on(sharding, turned, 1) == (Shard(0), Partial())
    assert placements_on(sharding, mesh, 1) == (Partial(), Shard(0), Partial())
    shuffled = torch_mesh((2, 4), ranks=[1, 5, 0, 4, 2, 6, 3, 7])  # the order of a sum is free
    assert placements_on(sharding, shuffled, 1) == (Shard(0), Partial())
    whole = layout_of((Partial(), Replicate(), Replicate()), mesh, (8,)).sharding
    assert placements_on(whole, torch_mesh((2, 4)), 1) == (Partial(), Replicate())
    with pytest.raises(UnrepresentableError, match="sums over groups of devices that are no axes"):
        placements_on(whole, torch_mesh((8,)), 1)


def test_placements_on_other_devices():
    rows = NamedSharding(make_mesh((4,), ("x",)), P("x"))
    with pytest.raises(UnrepresentableError, match=r"\[0, 1, 2, 3\].*\[4, 5, 6, 7\].*move nothing"):
        placements_on(rows, torch_mesh((4,), rank=4, ranks=[4, 5, 6, 7]), 1)
    back = torch_mesh((4,), ranks=[0, 3, 1, 2])
    with pytest.raises(UnrepresentableError, match="follow no order of the mesh axes"):
        placements_on(rows, back, 1)


# --- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placements", "error", "message"),
    [
        ((Shard(0),), ValueError, "1 placements for a mesh of 2 axes"),
        ((Shard(0),) * 3, ValueError, "3 placements for a mesh of 2 axes"),
        ((Shard(2), Replicate()), IndexError, "mesh axis 0 .*a tensor of rank 2 has no axis 2"),
        ((Replicate(), Shard(-3)), IndexError, "mesh axis 1 .*has no axis -3"),
        (
            ((Shard(0), Shard(1)), Replicate()),
            SpecError,
            r"mesh axis 0 has 2 placements.*it splits one tensor axis, or holds sums",
        ),
        ((Replicate(), (Shard(0), Partial())), SpecError, "mesh axis 1 has 2 placements"),
        (("dp", Replicate()), SpecError, "'dp' is no placement"),
        (
            (_StridedShard(0, split_factor=3), Shard(0)),
            UnrepresentableError,
            r"mesh axis 0 .*sf=3.*splits each of 3 parts.*make 1 or 2, so this is no order",
        ),
        (
            (Replicate(), _StridedShard(1, split_factor=2)),
            UnrepresentableError,
            r"mesh axis 1 .*2 parts of tensor axis 1.*make 1, so.*View that tensor axis as \(2, -1",
        ),
    ],
)
def test_refused_placements(placements, error, message):
    with pytest.raises(error, match=message):
        layout_of(placements, torch_mesh((2, 2)), (12, 12))
    with pytest.raises(error, match=message):
        check_count(placements, jax_mesh(torch_mesh((2, 2))))
        spec_of(placements, 2, (2, 2))


def test_spec_of_refuses_sums_and_factors_without_sizes():
    with pytest.raises(NotImplementedError, match=r"mesh axis 1 .*sums over devices are taken"):
        spec_of((Shard(0), Partial()), 2)
    with pytest.raises(ShardingError, match=r"split factors.*pass spec_of\(placements, ndim, mesh"):
        spec_of((_StridedShard(0, split_factor=2), Shard(0)), 2)


def test_one_mesh_axis_twice_is_no_sharding_either():
    explicit = Mesh(np.array(jax.devices()), ("x",), (AxisType.Explicit,))
    with pytest.raises(Exception, match="at most one positional dimension"):  # JAX's own class
        NamedSharding(explicit, P("x", "x"))
    with pytest.raises(ValueError, match="cannot overlap with unreduced"):
        NamedSharding(explicit, P("x", unreduced={"x"}))
    with pytest.raises(UnrepresentableError, match="leaves tensor axis 0 open"):
        placements_of(NamedSharding(make_mesh((8,), ("x",)), P(P.UNCONSTRAINED)))


def test_a_sharding_of_one_device_has_no_placements():
    alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for call in (placements_of, lambda sharding: placements_on(sharding, torch_mesh((1,)), 1)):
        with pytest.raises(UnrepresentableError, match="a SingleDeviceSharding names no mesh axes"):
            call(alone)


# --- meshes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", MESHES, ids=lambda shape: "x".join(map(str, shape)))
def test_meshes_round_trip(shape):
    given = torch_mesh(shape, ranks=range(math.prod(shape) - 1, -1, -1))
    mesh = jax_mesh(given)
    assert mesh.axis_names == given.mesh_dim_names and mesh.axis_sizes == shape
    assert [d.id for d in mesh.devices.flat] == given.mesh.ravel().tolist()
    assert mesh.are_all_axes_auto
    back = device_mesh_of(mesh)
    assert back.mesh.tolist() == given.mesh.tolist() and back.mesh_dim_names == mesh.axis_names
    assert jax_mesh(back) == mesh and device_mesh_of(mesh) is back


def test_unnamed_axes_and_parts_of_a_mesh():
    plain = DeviceMesh("xla", torch.tensor([[6, 4], [2, 0]]))
    mesh = jax_mesh(plain)
    assert mesh.axis_names == ("0", "1") and [d.id for d in mesh.devices.flat] == [6, 4, 2, 0]
    assert device_mesh_of(mesh) is plain
    fresh = device_mesh_of(Mesh(np.array(jax.devices()[2:4]), ("0",)))
    assert fresh.mesh_dim_names is None and fresh.mesh.tolist() == [2, 3]
    explicit = jax.make_mesh((2, 2), ("x", "y"))  # the types of axes are JAX's own affair
    assert device_mesh_of(explicit) is device_mesh_of(make_mesh((2, 2), ("x", "y")))
    typed = torch_mesh((4, 2), names=("u", "v"))
    assert device_mesh_of(jax_mesh(typed)) is device_mesh_of(jax_mesh(typed), "cpu") is typed
    assert jax_mesh(make_mesh((2, 4), ("x", "y"))).axis_names == ("x", "y")


def test_too_few_devices():
    with pytest.raises(DeviceError, match=r"ranks \[8, 9\].*8 devices.*init_distributed\(\) first"):
        jax_mesh(torch_mesh((10,)))


class FakeDevice:
    def __init__(self, process_index):
        self.process_index = process_index


def test_a_rank_is_the_one_device_of_its_process(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    devices = [FakeDevice(index) for index in (2, 0, 1)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    assert [device.process_index for device in meshes._devices_by_rank()] == [0, 1, 2]
    devices.append(FakeDevice(1))
    with pytest.raises(DeviceError, match=r"processes \[1\] have several JAX devices"):
        meshes._devices_by_rank()


def test_a_mesh_of_several_processes_needs_their_group(monkeypatch):
    mesh = make_mesh((3,), ("nobody_has_seen",))
    monkeypatch.setattr(jax, "process_count", lambda: 8)
    devices = jax.devices()
    monkeypatch.setattr(meshes, "_devices_by_rank", lambda: devices)
    with pytest.raises(DeviceError, match=r"needs torch's process group.*iso.init_distributed"):
        device_mesh_of(mesh)


# --- cost ----------------------------------------------------------------------------------------


def test_a_known_layout_costs_little():
    mesh = torch_mesh((2, 4))
    placements, shape = (_StridedShard(0, split_factor=4), Shard(0)), torch.Size((16, 8))
    sharding = layout_of(placements, mesh, shape).sharding
    assert layout_of(list(placements), torch_mesh((2, 4)), (16, 8)).sharding is sharding
    for call in (
        lambda: layout_of(placements, mesh, shape),
        lambda: placements_of(sharding),
        lambda: placements_on(sharding, mesh, 2),
        lambda: jax_mesh(mesh),
        lambda: device_mesh_of(sharding.mesh),
        lambda: local_shape_and_offset(shape, (2, 4), placements, (1, 2)),
    ):
        seconds = min(timeit.repeat(call, number=200, repeat=20)) / 200
        assert seconds < 20e-6


def test_importing_starts_nothing():
    code = """
import sys
import isoshard.torch_bridge.dtensor.translation
import torch
assert "torch.distributed.tensor" not in sys.modules
assert not torch.distributed.is_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_tiles_agree():
    sharding = layout_of((_StridedShard(0, split_factor=4), Shard(0)), torch_mesh((2, 4)), (8,))
    want = Tiles(np.arange(8).reshape(2, 4).T.reshape(8, 1))
    assert Tiles.from_sharding(sharding.sharding, 1) == want
