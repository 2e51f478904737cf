"""The RFC's examples on four ranks, beside the same on one process's mesh."""

import pytest
import torch

from isoshard.torch_bridge.distributed import DeviceMesh
from isoshard.torch_bridge.distributed import tensor as distributed
from isoshard.torch_bridge.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from tests.multi_process import ranks
from tests.torch_bridge.distributed import rfc_model

JOB = "rfc"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp(JOB)


@pytest.fixture(scope="module")
def four(scratch):
    return ranks.processes(JOB, 4, scratch, ranks.as_torchrun(4))


@pytest.fixture
def kept(four, scratch):
    """What rank 0 found: numbers by name."""
    return lambda name: torch.load(scratch / f"{name}.pt")


@pytest.mark.parametrize("check", ranks.checks_of(ranks.job_module(JOB)))
def test_on_four(four, check):
    four.assert_passed(check, 4)


def weighted(tensor):
    """As in the job."""
    x = tensor.detach()
    x = x[None] if x.dim() == 1 else x
    rows, columns = (torch.arange(1.0, n + 1).to("jax") for n in x.shape)
    return torch.cat([rows @ x, x @ columns]).cpu()


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_the_big_tensor_is_the_same(kept):
    mesh = DeviceMesh("jax", [0, 1, 2, 3])
    here = distribute_tensor(rfc_model.big_tensor(), mesh, [Shard(dim=0)])
    want = weighted(here)  # sums of thousands of terms in float32: their error goes by the largest
    torch.testing.assert_close(kept("big"), want, rtol=1e-4, atol=1e-6 * want.abs().max().item())


@pytest.mark.parametrize(
    ("grid", "placements", "size", "name"),
    [
        ([0, 1, 2, 3], [Shard(0)], (8, 12), "ones-1-12-2"),
        ([0, 1, 2, 3], [Shard(1)], (8, 12), "ones-1-12-8"),
        ([0, 1, 2, 3], [Replicate()], (8, 12), "ones-1-12-8"),
        ([[0, 1], [2, 3]], [Replicate(), Shard(0)], (8, 8), "ones-2-8-4"),
    ],
)
def test_what_is_made_is_the_same(grid, placements, size, name, kept):
    mesh = DeviceMesh("jax", grid)
    close(kept(name), weighted(distributed.ones(size, device_mesh=mesh, placements=placements)))


def test_what_comes_from_local_tensors_is_the_same(kept):
    device_mesh = DeviceMesh("jax", [0, 1, 2, 3])
    local_tensor = rfc_model.local_tensor().requires_grad_()
    rowwise_tensor = DTensor.from_local(local_tensor, device_mesh, [Shard(0)])
    colwise_tensor = rowwise_tensor.redistribute(device_mesh, [Shard(1)])
    replica_tensor = colwise_tensor.redistribute(device_mesh, [Replicate()])
    found = [weighted(t) for t in (rowwise_tensor, colwise_tensor, replica_tensor)]
    close(kept("from-local"), torch.stack(found))
    (replica_tensor * rfc_model.weights().to("jax")).sum().backward()
    close(kept("from-local-gradient"), weighted(local_tensor.grad.to("jax")))


@pytest.mark.parametrize("partition", rfc_model.partitions(distribute_tensor))
def test_the_trained_module_is_the_same(partition, kept):
    model, x = rfc_model.model_and_input()
    mesh = DeviceMesh("jax", [[0, 1], [2, 3]])
    distribute_module(model, mesh, partition_fn=partition)
    losses = rfc_model.trained(model, distribute_tensor(x, mesh))
    there = kept(partition.__name__)
    torch.testing.assert_close(there.pop("losses"), losses)
    assert set(there) == {name for name, _ in model.named_parameters()}
    for name, numbers in there.items():
        close(numbers, weighted(model.get_parameter(name)))
