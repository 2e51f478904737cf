"""Loaders: rows that do not divide."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.core.errors import UnevenError
from isoshard.torch_bridge.spmd import UnevenWarning
from isoshard.torch_bridge.torch_xla.distributed.parallel_loader import (
    MpDeviceLoader,
)
from tests.torch_bridge.torch_xla.loaders import (
    grid_mesh,
    pair,
    part,
    rows,
)


@pytest.fixture
def grid() -> xs.Mesh:
    return grid_mesh()


def ten(last: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(rows(8, 2, seed=n), torch.arange(8)) for n in range(2)] + [
        (rows(last, 2, seed=9), torch.arange(last))
    ]


def by_key(batches: Iterable[Any]) -> list[dict[str, Any]]:
    return [{"x": x, "y": y} for x, y in batches]


def test_keep_lays_it_whole_and_says_so(grid):
    loader = MpDeviceLoader([x for x, _ in ten(5)], "jax", input_sharding=pair(grid))
    with pytest.warns(UnevenWarning, match=r"batch.*axis 0.*5.*stay whole.*last_batch") as caught:
        got = [x for _ in range(2) for x in loader]
    assert len(caught) == 1 and caught[0].filename == __file__
    assert [x.named_sharding.spec == iso.P() for x in got] == [False, False, True] * 2
    assert len({x.sharding_spec for x in got}) == 1, "as torch_xla, which pads, calls it"
    assert torch.equal(got[2].cpu(), ten(5)[2][0])
    assert got[2].local_shards[4].unpadded_data.tolist() == ten(5)[2][0][4:].tolist()


def test_drop_leaves_out_the_last_batch(grid):
    loader = MpDeviceLoader(
        [x for x, _ in ten(5)], "jax", input_sharding=pair(grid), last_batch="drop"
    )
    assert [x.shape[0] for x in loader] == [8, 8]
    whole = MpDeviceLoader(
        [x for x, _ in ten(8)], "jax", input_sharding=pair(grid), last_batch="drop"
    )
    assert [x.shape[0] for x in whole] == [8, 8, 8]


def test_drop_refuses_a_batch_in_the_middle(grid):
    batches = [rows(8, 2), rows(6, 2), rows(8, 2)]
    it = iter(MpDeviceLoader(batches, "jax", input_sharding=pair(grid), last_batch="drop"))
    assert next(it).shape == (8, 2)
    with pytest.raises(UnevenError, match=r"6 rows does not split .* over 8.*not the last one"):
        next(it)
    assert list(it) == []


def test_pad_repeats_the_first_rows_in_all_tensors_of_the_batch(grid):
    specs = {"x": pair(grid), "y": None}
    loader = MpDeviceLoader(by_key(ten(5)), "jax", input_sharding=specs, last_batch="pad")
    last = list(loader)[2]
    x, y = ten(5)[2]
    assert torch.equal(last["x"].cpu(), torch.cat([x, x[:3]]))
    assert last["y"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2] == [*y.tolist(), 0, 1, 2]
    assert last["x"].sharding_type.name == "TILED"
    tiny = MpDeviceLoader([rows(3, 2)], "jax", input_sharding=pair(grid), last_batch="pad")
    assert torch.equal(next(iter(tiny)).cpu(), rows(3, 2)[torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])])


def test_another_axis_may_count_the_rows(grid):
    spec = xs.ShardingSpec(grid, (None, "data"))
    loader = MpDeviceLoader([rows(3, 6)], "jax", batchdim=1, input_sharding=spec, last_batch="pad")
    assert torch.equal(next(iter(loader)).cpu(), rows(3, 6)[:, [0, 1, 2, 3, 4, 5, 0, 1]])


def test_another_axis_that_does_not_divide_stays_whole(grid):
    spec = xs.ShardingSpec(grid, ("data", "model"))
    loader = MpDeviceLoader([[rows(8, 3)]], "jax", input_sharding=spec)
    with pytest.warns(UnevenWarning, match=r"batch\[0\].*axis 1 .*3.*stay whole"):
        ((got,),) = loader
    assert got.named_sharding.spec == iso.P("data") and torch.equal(got.cpu(), rows(8, 3))


def test_a_part_of_a_batch_must_divide(grid):
    loader = MpDeviceLoader([rows(5, 2)], "jax", input_sharding=part(grid, ("data", None)))
    with pytest.raises(UnevenError, match=r"5 rows does not split evenly over 4 shards"):
        next(iter(loader))
    loader = MpDeviceLoader([rows(8, 3)], "jax", input_sharding=part(grid, ("data", "model")))
    with pytest.raises(UnevenError, match=r"axis 1 has size 3 in this process, which its 2 shards"):
        next(iter(loader))


def test_the_length_counts_what_comes(grid):
    data = torch.utils.data.TensorDataset(rows(21, 2))
    for batch, drop_last, count in ((8, False, 2), (8, True, 2), (5, False, 5), (3, False, 7)):
        cpu = torch.utils.data.DataLoader(data, batch_size=batch, drop_last=drop_last)
        loader = MpDeviceLoader(cpu, "jax", input_sharding=pair(grid), last_batch="drop")
        assert len(MpDeviceLoader(cpu, "jax")) == len(cpu)
        if batch == 8:
            assert len(loader) == len(list(loader)) == len(iter(loader)) == count
        else:
            assert len(cpu) == count
    with pytest.raises(TypeError, match="len"):
        len(MpDeviceLoader(iter([]), "jax"))
