"""Frames below an operation are skipped where only code of torch and isoshard can run."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.engine.capture.executed_code import ExecutedCode, SkippedFrames

options = types.SimpleNamespace(scale=2.0)


@pytest.fixture(autouse=True)
def as_before():
    options.scale = 2.0


def ones() -> torch.Tensor:
    return torch.ones(3, device="jax")


class Scaling(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        got = func(*args, **(kwargs or {}))
        return got * options.scale if func is torch.ops.aten.sin.default else got


@torch.library.custom_op("isoshard_skipped::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * options.scale


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = torch.utils._pytree.tree_map_only(Wrapper, lambda one: one.inner, args)
        return func(*inner, **(kwargs or {})) * options.scale


def with_a_mode(x):
    with Scaling():
        return x.sin()


def with_a_wrapper(x):
    return torch.sin(Wrapper(x))


def in_a_list(x):
    return torch.stack([Wrapper(x), Wrapper(x)])[1]


@pytest.mark.parametrize(
    "function", [with_a_mode, with_a_wrapper, in_a_list, scaled], ids=lambda one: str(one)[:20]
)
def test_what_a_users_code_below_an_operation_reads_is_guarded(function):
    step = xs.compile(lambda x: function(x) + 1)
    first, again = step(ones()), step(ones())
    assert first.tolist() == again.tolist() and len(step.replays) == 1
    options.scale = 5.0
    want = function(ones()) + 1
    assert want.tolist() != first.tolist()
    assert step(ones()).tolist() == pytest.approx(want.tolist())


def test_a_mode_around_the_step_is_recorded():
    step = xs.compile(lambda x: x.sin())
    with Scaling():
        step(ones())
        first = step(ones())
        options.scale = 5.0
        got = step(ones())
    want = [one * 5.0 for one in torch.sin(torch.ones(3)).tolist()]
    assert got.tolist() == pytest.approx(want) != pytest.approx(first.tolist())


def test_noting_goes_on_after_an_error_below_an_operation():
    def fails(x):
        try:
            x @ ones()[:2]
        except RuntimeError:
            return x * options.scale
        raise AssertionError

    step = xs.compile(fails)
    assert step(ones())[0].item() == step(ones())[0].item() == 2.0
    options.scale = 5.0
    assert step(ones())[0].item() == 5.0


def test_a_profiler_of_the_step_itself_stays():
    def profile(frame, event, argument):
        """Of the user."""

    sys.setprofile(profile)
    try:
        with SkippedFrames() as skipped:
            assert sys.getprofile() is profile
            assert skipped.call(len, ([1],), {}) == 1
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)


def test_what_is_called_is_recorded_and_what_is_between_is_not():
    def hidden():
        return options.scale

    def recorded():
        with SkippedFrames() as inner:
            assert inner._profiler is not None
        return sys.getprofile()

    with ExecutedCode() as executed:
        with SkippedFrames() as skipped:
            hidden()
            within = skipped.call(recorded, (), {})
            assert sys.getprofile() is None
        assert sys.getprofile() is within
    assert id(recorded.__code__) in executed.codes and id(hidden.__code__) not in executed.codes
