"""The floor follows the engine's operations one by one."""

from __future__ import annotations

import pytest
import torch

from benchmarks import floor, phases, recording
from benchmarks.models import gpt2
from isoshard.torch_bridge.engine.recording import lazy_tensor


def test_the_floor_runs_the_same_operations():
    results = recording.measure(gpt2.problem(phases.QUICK), rounds=1)
    assert results["floor"]["ops"] == results["isoshard"]["ops"] > 100
    assert 0 < results["isoshard"]["entries"]
    assert results["floor"]["us_per_op_to_floor"] == 1
    assert 0 < results["floor"]["median_us_per_op"] < results["isoshard"]["median_us_per_op"]
    assert {"us_per_op", "us_per_cpu_op", "chain_us_per_op"} <= set(results["torch CPU"])


def test_a_step_that_ends_early_is_noticed():
    x = torch.ones(2, device="jax")
    stream = floor.Stream.of(lambda: x + x + x)
    bare = floor.place(torch.ones(2))
    with pytest.raises(RuntimeError, match="1 of 2 operations of the stream did not run"):
        with floor.replaying(stream):
            bare + bare


def test_the_stream_leaves_the_engine_as_it_was():
    x = torch.ones(2, device="jax")
    stream = floor.Stream.of(lambda: x * 2)
    x + 1
    assert [name for name, _ in stream.items] == ["aten::mul.Tensor"]


def test_an_operation_takes_until_its_own_end():
    x = torch.ones(2, device="jax")
    spans = phases.intervals(lazy_tensor.LazyTensor, lambda: (x + 1).sum().item())
    assert len(spans) == 3  # add, sum, _local_scalar_dense
    assert spans[2] > spans[1]  # the last one compiled and ran the program
    with pytest.raises(RuntimeError):
        phases.intervals(lazy_tensor.LazyTensor, lambda: x @ torch.ones(3, device="jax"))
    assert (x + 1).tolist() == [2.0, 2.0]
