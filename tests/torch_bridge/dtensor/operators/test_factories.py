"""Factories that take a distributed tensor for their model lie as it, as DTensor's do."""

import pytest
import torch
from torch.distributed.tensor import distribute_tensor as torch_distribute

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.distributed.tensor import distribute_tensor
from tests.torch_bridge.distributed import oracle
from tests.torch_bridge.dtensor.operators.placed import PLACEMENTS, data, mesh_of

FACTORIES = {
    "zeros_like": torch.zeros_like,
    "ones_like of integers": lambda t: torch.ones_like(t, dtype=torch.int32),
    "empty_like": torch.empty_like,
    "rand_like": torch.rand_like,
    "randint_like": lambda t: torch.randint_like(t, 5),
    "clone": torch.clone,
    "new_zeros": lambda t: t.new_zeros(t.shape),
    "new_empty_strided": lambda t: t.new_empty_strided(t.shape, t.stride()),
    "new_full of another shape": lambda t: t.new_full((8, 8), 3.0),
}


@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")  # on torch's CPU mesh
def test_results_lie_as_dtensors():
    whole, found, want = data(16, 24), [], []
    for shape, placements in (PLACEMENTS[1], PLACEMENTS[3]):
        placed = distribute_tensor(whole, mesh_of(shape), placements)
        found += [make(placed) for make in FACTORIES.values()]
        with oracle.ranks(shape) as torch_mesh:
            there = torch_distribute(whole, torch_mesh, placements)
            want += [make(there).placements for make in FACTORIES.values()]
    xs.sync()
    assert [made.placements for made in found] == want
    parts = [made.local_shards[0].data.shape for made in found]
    assert parts == [made.to_local().shape for made in found]
