"""Placements and specs are one layout in two languages: exhaustively, against torch and JAX.

Meshes of ranks 1 to 3 of up to 8 devices, every order of mesh axes on every tensor axis of tensors
of ranks 1 to 3, even sizes and sizes that `torch.chunk` cuts unevenly.
"""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from isoshard.core.layout.spec import same_layout
from isoshard.errors import UnrepresentableError
from isoshard.sharding import Tiles
from isoshard.torch_bridge.placements.chunked_axes import chunk_ranges
from isoshard.torch_bridge.placements.translation import (
    jax_mesh,
    layout_of,
    local_shape_and_offset,
    placements_of,
    spec_of,
)
from tests import fresh
from tests.torch_bridge.dtensor.layouts import MESHES, all_placements, in_words, orders, torch_mesh

UNEVEN = [(5, 3, 7), (1, 11, 2), (13, 0, 9)]


def test_there_are_as_many_cases_as_there_should_be():
    assert len(list(orders(3, 3))) == 106
    assert len(all_placements((2, 2, 2), 3)) == 106
    strided = in_words(((2, 0, 1),), (2, 2, 2))
    assert strided == (*[_StridedShard(0, split_factor=2)] * 2, Shard(0))


@pytest.mark.parametrize("shape", MESHES, ids=lambda shape: "x".join(map(str, shape)))
def test_every_rank_holds_what_torch_says_and_the_same_blocks_in_jax(shape):
    count = math.prod(shape)
    views = [torch_mesh(shape, rank) for rank in range(count)]
    places = list(np.ndindex(*shape))
    for ndim in (1, 3):
        even, odd = (2 * count, count, 3 * count)[:ndim], UNEVEN[sum(shape) % 3][:ndim]
        # An axis of one device splits nothing: there two ranks are compared with torch's.
        step = 1 if 1 not in shape else max(1, count - 1)
        for placements, size in itertools.product(all_placements(shape, ndim), (even, odd)):
            held = [local_shape_and_offset(size, shape, placements, place) for place in places]
            for view, ours in zip(views[::step], held[::step], strict=True):
                assert compute_local_shape_and_global_offset(size, view, placements) == ours
            if size is odd and any(isinstance(p, _StridedShard) for p in placements):
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
                assert "ranges that are not consecutive" in str(error)
                refused += 1
            else:
                check_blocks(layout, held)
                accepted += 1
    assert accepted > 10 * refused > 0


def is_strided(placement):
    return isinstance(placement, _StridedShard)


def test_fsdp_over_tensor_parallel_with_a_block_in_two_pieces():
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    assert chunk_ranges(13, [(3, 2, 2), (2, 0, 1)]) == [(6, 7), (11, 12)]
    with pytest.raises(UnrepresentableError, match=r"size 13.*\[\(6, 7\), \(11, 12\)\].*of 6"):
        layout_of(placements, torch_mesh((3, 2)), (13,))


# Factors that no order of mesh axes has: the pieces are torch's all the same.
@pytest.mark.parametrize(
    ("shape", "extent"),
    [((2,), 24), ((4,), 13), ((2, 2), 1), ((2, 2), 13), ((3, 2), 24), ((3, 2), 13)],
)
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


def test_importing_starts_nothing(tmp_path):
    """The package is imported anew where DTensor cannot be."""
    code = """
import sys
import torch
apart = "torch.distributed.tensor", "isoshard.torch_bridge.dtensor"
for name in [name for name in sys.modules if name.startswith(apart)]:
    del sys.modules[name]
sys.modules["torch.distributed.tensor"] = None
import isoshard.torch_bridge.placements.translation
assert not torch.distributed.is_initialized()
"""
    done = fresh.run(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_tiles_agree():
    sharding = layout_of((_StridedShard(0, split_factor=4), Shard(0)), torch_mesh((2, 4)), (8,))
    want = Tiles(np.arange(8).reshape(2, 4).T.reshape(8, 1))
    assert Tiles.from_sharding(sharding.sharding, 1) == want
