"""The floor follows the engine's operations one by one."""

from __future__ import annotations

import pytest
import torch

from benchmarks import floor, phases, recording
from benchmarks.models import gpt2


def test_the_floor_runs_the_same_operations():
    results = recording.measure(gpt2.problem(phases.QUICK), rounds=1)
    assert results["floor"]["ops"] == results["isoshard"]["ops"] > 100
    assert 0 < results["isoshard"]["entries"]
    assert results["floor"]["us_per_op_to_floor"] == 1
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
