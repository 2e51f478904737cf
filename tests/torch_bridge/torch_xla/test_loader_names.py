"""Loaders: torch_xla's names and options."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.core.errors import DeviceError, SpecError, UnevenError
from isoshard.torch_bridge.torch_xla.distributed.parallel_loader import (
    MpDeviceLoader,
    ParallelLoader,
    PerDeviceLoader,
    PerDeviceQueue,
)
from tests.torch_bridge.torch_xla.loaders import (
    Source,
    grid_mesh,
    pair,
    rows,
)


@pytest.fixture
def grid() -> xs.Mesh:
    return grid_mesh()


def test_operations_run_every_so_many_batches(counted):
    executed = []
    total = torch.zeros((), device="jax")
    for x in MpDeviceLoader(Source(6), "jax", batches_per_execution=3):
        executed.append(counted("executions"))
        total = total + x.sum()
    executed.append(counted("executions"))
    # Calls 3 and 6 execute what two and three batches brought, the end what the last one did.
    assert [b - a for a, b in itertools.pairwise(executed)] == [0, 1, 0, 0, 1, 1]
    assert total.item() == 16 * 15


def test_the_parts_of_a_parallel_loader():
    batches = [rows(8, 2, seed=n) for n in range(3)]
    parallel = ParallelLoader(batches, [torch.device("jax", 0)], batches_per_execution=2)
    assert parallel.batches_per_execution == 2 and parallel.per_device_samples() == 3
    it = parallel.per_device_loader("jax")
    assert isinstance(it, PerDeviceLoader) and len(it) == 3 and iter(it) is it
    assert torch.equal(it.next().cpu(), batches[0])
    assert torch.equal(parallel.next_item("jax").cpu(), batches[1])
    assert torch.equal(next(it).cpu(), batches[2])
    assert parallel.next_item("jax") is None
    with pytest.raises(StopIteration):
        it.next()
    sent = parallel.send_cpu_data_to_device([{"x": batches[0]}, batches[1]], "jax")
    assert torch.equal(sent[0]["x"].cpu(), batches[0]) and torch.equal(sent[1].cpu(), batches[1])
    queue = PerDeviceQueue("jax", 4, 2)
    assert (queue.cpu_loader_queue.size, queue.queue.size) == (4, 2)


def test_uploading_at_once_refuses_what_would_be_dropped(grid):
    parallel = ParallelLoader([], ["jax"], input_sharding=pair(grid), last_batch="drop")
    with pytest.raises(UnevenError, match="5 rows"):
        parallel.send_cpu_data_to_device([rows(5, 2)], "jax")


def test_options_may_be_set_between_epochs(grid):
    """As `transformers` does for SPMD."""
    loader = MpDeviceLoader([rows(8, 2)], "jax")
    loader._parallel_loader_kwargs["input_sharding"] = xs.ShardingSpec(grid, ("data", None))
    (got,) = loader
    assert got.partition_spec == iso.P("data")


def test_a_shuffled_data_loader_gives_what_it_gives_alone():
    data = torch.utils.data.TensorDataset(torch.arange(24), rows(24, 2))

    def epochs(wrap: Callable[[Any], Any]) -> list[list[int]]:
        generator = torch.Generator().manual_seed(3)
        loader = wrap(
            torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, generator=generator)
        )
        return [[n for numbers, _ in loader for n in numbers.tolist()] for _ in range(2)]

    assert epochs(lambda loader: MpDeviceLoader(loader, "jax")) == epochs(lambda loader: loader)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batches_per_execution": 0}, ValueError, r"batches_per_execution is at least 1"),
        ({"loader_prefetch_size": 0}, ValueError, r"loader_prefetch_size is at least 1; given: 0"),
        ({"device_prefetch_size": -1}, ValueError, r"device_prefetch_size is at least 1"),
        ({"host_to_device_transfer_threads": 0}, ValueError, r"transfer_threads is at least 1"),
        ({"batchdim": -1}, ValueError, r"batchdim is at least 0; given: -1"),
        ({"last_batch": "skip"}, ValueError, r"one of keep, drop, pad; given: 'skip'"),
        ({"input_sharding": ("data",)}, TypeError, r"is a ShardingSpec.*given: tuple"),
    ],
)
def test_options_are_checked(options, error, message):
    with pytest.raises(error, match=message):
        iter(MpDeviceLoader([rows(8)], "jax", **options))


def test_a_spec_that_does_not_fit_its_mesh_is_told_at_the_start(grid):
    spec = xs.ShardingSpec(grid, ("data", None))
    spec.partition_spec = ("batch", None)
    with pytest.raises(SpecError, match="no mesh axis is called 'batch'"):
        ParallelLoader([], ["jax"], input_sharding=spec)


def test_the_device_is_the_one_that_stands_for_the_mesh():
    for device in ("jax", "xla", torch.device("jax", 0)):
        assert len(list(MpDeviceLoader([rows(2)], device))) == 1
    for device in ("cpu", "jax:1"):
        with pytest.raises(DeviceError, match=rf"uploads to jax:0, and was given {device}"):
            MpDeviceLoader([], device)
    with pytest.raises(DeviceError, match=r"one device, which stands .* given 2"):
        ParallelLoader([], ["jax", "jax"])
