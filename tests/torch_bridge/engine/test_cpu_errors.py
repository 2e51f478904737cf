"""A call with two faults raises what CPU torch raises for it."""

from __future__ import annotations

import pytest
import torch

import isoshard.torch_bridge as xs  # noqa: F401
from isoshard.core.errors import DeviceError
from isoshard.torch_bridge.engine.operators import cpu_errors

TWO_FAULTS = {
    "an axis, then complex": lambda d: _ones(d, torch.complex64).max(2),
    "aminmax": lambda d: _ones(d, torch.complex64).aminmax(dim=3),
    "whole numbers": lambda d: _ones(d, torch.int32).logcumsumexp(4),
    "twice, and beyond": lambda d: _ones(d, torch.float32).var((-1, 1, 5)),
    "bits of floats, in place": lambda d: _ones(d, torch.int32).bitwise_or_(2.5),
    "fmod_": lambda d: _ones(d, torch.int32).fmod_(2j),
    "copysign_": lambda d: _ones(d, torch.int32).copysign_(2j),
    "atan2_": lambda d: _ones(d, torch.int32).atan2_(_ones(d, torch.complex64)),
    "complex windows": lambda d: torch.nn.functional.conv2d(
        _ones(d, torch.bool)[None, None], _ones(d, torch.bool)[None, None], padding=-9
    ),
}


def _ones(device, dtype):
    return torch.ones(2, 2, dtype=dtype, device=device)


@pytest.mark.parametrize("call", TWO_FAULTS.values(), ids=TWO_FAULTS)
def test_a_call_with_two_faults_raises_as_on_the_cpu(call):
    with pytest.raises(Exception) as theirs:
        call("cpu")
    with pytest.raises(Exception) as ours:
        call("jax")
    assert type(ours.value) is type(theirs.value)


def test_our_words_stay_where_the_class_is_the_same():
    with pytest.raises(NotImplementedError, match=r'^"softmax" not implemented for \'Long\''):
        torch.ones(2, dtype=torch.int64, device="jax").softmax(0)  # a kernel's name on the CPU


def test_errors_of_isoshard_stay():
    error = DeviceError("the device")
    call = (torch.ops.aten.relu.default, (torch.ones(2, device="jax"), 3), {})
    assert cpu_errors.like_cpu(*call, error) is error
    assert type(cpu_errors.like_cpu(*call, ValueError("other"))) is RuntimeError


@pytest.mark.parametrize("shape", [(2**13, 2**13), (1, 2**20)])
def test_a_large_call_is_not_repeated_on_the_cpu(shape, monkeypatch):
    monkeypatch.setattr(torch, "zeros", None)
    error = ValueError("too large")
    tensor = torch.ones(2, device="jax").expand(2**20, 2)
    call = (torch.ops.aten.repeat.default, (tensor, shape), {})
    assert cpu_errors.like_cpu(*call, error) is error


def test_a_refused_call_draws_no_numbers():
    state = torch.get_rng_state()
    with pytest.raises(NotImplementedError):
        torch.ones(2, dtype=torch.bool, device="jax").normal_()
    assert torch.equal(torch.get_rng_state(), state)


def test_operands_that_share_memory_share_it_on_the_cpu():
    memory = torch.ones(4, device="jax")
    with pytest.raises(RuntimeError, match="memory"):
        memory[1:].add_(memory[:-1])


@pytest.mark.parametrize("dim", [0, -1, 1, 99])
def test_the_only_axis_of_a_number(dim):
    for function in (torch.quantile, torch.nanquantile):
        found = []
        for device in ("cpu", "jax"):
            try:
                found.append(function(torch.tensor(2.0, device=device), 0.5, dim=dim).item())
            except IndexError as error:
                found.append(type(error))
        assert found[0] == found[1]


def test_a_memory_format_of_another_rank_is_refused_on_the_way_to_the_cpu():
    x = torch.ones(2, 3, device="jax")
    with pytest.raises(RuntimeError, match="rank 4"):
        x.to("cpu", memory_format=torch.channels_last)
    y = torch.randn(2, 3, 4, 5)
    moved = y.to("jax").to("cpu", memory_format=torch.channels_last)
    assert moved.is_contiguous(memory_format=torch.channels_last) and torch.equal(moved, y)
