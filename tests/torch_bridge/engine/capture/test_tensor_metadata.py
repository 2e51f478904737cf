"""A replay changes its arguments themselves as the step does; other tensors are not left stale."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import isoshard.torch_bridge as xs


def double(w: Any) -> None:
    w.data = w * 2


CHANGES: dict[str, Callable[[Any], Any]] = {
    "unsqueeze_": lambda w: w.unsqueeze_(0),
    "resize_": lambda w: w.resize_(4),
    "as_strided_": lambda w: w.as_strided_((2, 2), (2, 1)),
    "requires_grad_": lambda w: w.requires_grad_(),
    "data": double,
    "set_": lambda w: w.set_(w * 2),
    "written": lambda w: w.mul_(3).unsqueeze_(0),
}
REPEATED = ("unsqueeze_", "resize_", "as_strided_", "requires_grad_", "written")


def described(tensor: torch.Tensor) -> Any:
    return tensor.tolist(), tensor.shape, tensor.stride(), tensor.requires_grad


def values(number: int) -> torch.Tensor:
    return (torch.arange(8.0) * number).to("jax")


@pytest.mark.parametrize("change", CHANGES)
def test_of_an_argument(change, counted):
    def step(x: Any) -> Any:
        CHANGES[change](x)
        return x.detach() * 3

    def run(step: Any) -> list[Any]:
        given = [values(number) for number in (1, 2, 3)]
        return [(step(x).tolist(), described(x)) for x in given]

    assert run(xs.compile(step)) == run(step)
    assert counted("calls_without_replay") == (0 if change in REPEATED else 3)


@pytest.mark.parametrize("change", CHANGES)
def test_of_a_state(change):
    def run(wrap: Any) -> list[Any]:
        state = SimpleNamespace(weight_83=values(1))

        def step(x: Any) -> Any:
            CHANGES[change](state.weight_83)
            return state.weight_83.detach().reshape(-1)[1] * x

        compiled = wrap(step)
        return [(compiled(values(k)).tolist(), described(state.weight_83)) for k in (1, 2, 3)]

    assert run(xs.compile) == run(lambda step: step)


def test_a_refused_step_leaves_shapes_as_they_were():
    def step(x: Any) -> Any:
        return x.unsqueeze_(0) * x.sum().item()

    x = values(1)
    with pytest.raises(xs.CaptureError):
        xs.compile(step)(x)
    assert x.shape == (8,)
