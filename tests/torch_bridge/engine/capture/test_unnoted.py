"""Code below an operation is not noted where only torch's and ours can run; anybody else's is."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.engine.capture.executed_code import Executed, Unnoted

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


@torch.library.custom_op("isoshard_unnoted::scaled", mutates_args=())
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


def test_a_mode_around_the_step_is_noted():
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
        with Unnoted() as unnoted:
            assert sys.getprofile() is profile
            assert unnoted.call(len, ([1],), {}) == 1
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)


def test_what_is_called_is_noted_and_what_is_between_is_not():
    def hidden():
        return options.scale

    def noted():
        with Unnoted() as inner:
            assert inner._noting is not None
        return sys.getprofile()

    with Executed() as executed:
        with Unnoted() as unnoted:
            hidden()
            within = unnoted.call(noted, (), {})
            assert sys.getprofile() is None
        assert sys.getprofile() is within
    assert id(noted.__code__) in executed.codes and id(hidden.__code__) not in executed.codes
