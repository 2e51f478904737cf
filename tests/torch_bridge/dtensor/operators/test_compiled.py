"""Programs that lay tensors out, as captured steps; dynamo's: `distributed/test_fullgraph`."""

import pytest
import torch
from torch.nn.functional import mse_loss

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.distributed.tensor import DTensor, distribute_tensor
from isoshard.torch_bridge.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from tests.torch_bridge.dtensor.operators.placed import S0, S1, R, data, mesh_of

MESH = (2, 4)
PROGRAMS = {
    "operators": lambda x: (x * x + 2).sum(1),
    "redistribute": lambda x: (x * 2).redistribute(mesh_of(MESH), [R, S1]).relu() + 1,
    "own mesh": lambda x: x.redistribute(x.device_mesh, [S1, S0]) * 3,
    "asked mesh": lambda x: (x * 2).redistribute(mesh_of(MESH), [R, S1]) * x.device_mesh.size(),
    "type": lambda x: (x + 1) * (2 if isinstance(x + 1, DTensor) else 3),
    "own placements": lambda x: x + len(x.placements),
    "pieces": lambda x: DTensor.from_local(x.to_local() * 2, mesh_of(MESH), [S0, R]) + 1,
    "whole": lambda x: x.full_tensor().cumsum(0),
}


def test_results_are_those_without():
    """All programs as one function."""
    mesh = mesh_of(MESH)

    def programs(x):
        return [program(x) for program in PROGRAMS.values()]

    run = xs.compile(programs)
    for seed in range(2):
        whole = data(8, 8, seed=seed).float()
        want = programs(distribute_tensor(whole, mesh, [S0, R]))
        found = run(distribute_tensor(whole, mesh, [S0, R]))
        xs.sync()
        for name, got, one in zip(PROGRAMS, found, want, strict=True):
            torch.testing.assert_close(got.cpu(), one.cpu(), msg=name)
            assert got.placements == one.placements, name


def test_a_parallel_block_trains_alike():
    def trained(wrap):
        torch.manual_seed(0)
        block = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
        styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        block = parallelize_module(block.to("jax"), mesh_of(MESH)["t"], styles)
        optimizer = torch.optim.AdamW(block.parameters(), lr=0.01)

        @wrap
        def step(x):
            optimizer.zero_grad()
            loss = mse_loss(block(x), x)
            loss.backward()
            optimizer.step()
            return loss

        batches = [data(8, 8, seed=seed).float().to("jax") for seed in range(2)]
        return [step(batch).item() for batch in batches]

    assert trained(xs.compile) == pytest.approx(trained(lambda step: step), rel=1e-5)
