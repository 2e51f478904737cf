"""Errors arrive as exceptions wherever they are raised, all in one process."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

NAME = "isoshard_autograd_tests"


class Raises(torch.autograd.Function):
    """Raises in forward or backward, or gives what is not a gradient, as `backward` says."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backward: Callable[..., Any] | None) -> torch.Tensor:
        if backward is None:
            raise ZeroDivisionError("in forward")
        ctx.of = backward
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return ctx.of(g), None


@torch.library.custom_op(f"{NAME}::nothing", mutates_args=(), device_types="cpu")
def nothing(x: torch.Tensor) -> torch.Tensor:
    """An operator that nobody taught JAX."""
    return x.clone()


@nothing.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _raise(where: str) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError(where)

    return fail


def _hooked(x: torch.Tensor) -> None:
    y = x * 2
    y.register_hook(_raise("in a hook"))
    y.sum().backward()


def _module_hook(x: torch.Tensor) -> None:
    layer = torch.nn.Linear(3, 2).to("jax")
    layer.register_full_backward_hook(_raise("in a module hook"))
    layer(x).sum().backward()


def _checkpointed(x: torch.Tensor) -> None:
    calls: list[int] = []

    def block(a: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise ZeroDivisionError("in recomputation")
        return a.sin()

    checkpoint(block, x, use_reentrant=False).sum().backward()


def _post_accumulate(x: torch.Tensor) -> None:
    x.register_post_accumulate_grad_hook(_raise("after accumulation"))
    x.sum().backward()


def _step_hook(x: torch.Tensor) -> None:
    optimizer = torch.optim.SGD([x], lr=0.1)
    optimizer.register_step_pre_hook(_raise("before the step"))
    x.sum().backward()
    optimizer.step()


def _backward(of: Callable[..., Any]) -> Callable[[torch.Tensor], None]:
    return lambda x: Raises.apply(x, of).sum().backward()


ERRORS: dict[str, tuple[Callable[[torch.Tensor], Any], type[Exception], str]] = {
    "forward": (lambda x: Raises.apply(x, None), ZeroDivisionError, "in forward"),
    "backward": (_backward(_raise("in backward")), ZeroDivisionError, "in backward"),
    "shape": (_backward(lambda g: torch.ones(7, device="jax")), RuntimeError, "invalid gradient"),
    "dispatch in backward": (_backward(nothing), NotImplementedError, r"register_lowering"),
    "dispatch": (lambda x: nothing(x.detach()), NotImplementedError, r"register_lowering"),
    "shapes": (lambda x: x @ torch.ones(9, device="jax"), RuntimeError, r"size|shape"),
    "no gradient": (lambda x: x.detach().sum().backward(), RuntimeError, r"does not require grad"),
    "tensor hook": (_hooked, ZeroDivisionError, "in a hook"),
    "module hook": (_module_hook, ZeroDivisionError, "in a module hook"),
    "recomputation": (_checkpointed, ZeroDivisionError, "in recomputation"),
    "post accumulate hook": (_post_accumulate, ZeroDivisionError, "after accumulation"),
    "optimizer hook": (_step_hook, ZeroDivisionError, "before the step"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_arrives_as_an_exception_and_work_goes_on(name):
    function, error, message = ERRORS[name]
    for _ in range(2):
        x = torch.arange(3.0).to("jax").requires_grad_()
        with pytest.raises(error, match=message):
            function(x)
        x.grad = None
        x._backward_hooks = None
        y = x.detach().requires_grad_()
        (y * y).sum().backward()
        assert y.grad.tolist() == [0, 2, 4]


def test_threads():
    """An error arrives on its own; what one has recorded, another can use and differentiate."""

    def work(fail: bool) -> list[float]:
        x = torch.arange(3.0).to("jax").requires_grad_()
        (_backward(_raise("in backward"))(x) if fail else (x * x).sum().backward())
        return x.grad.tolist()

    x = torch.arange(3.0).to("jax") * 2
    leaf = torch.arange(3.0).to("jax").requires_grad_()
    loss = (leaf.sin() ** 2).sum()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        good, bad = pool.submit(work, False), pool.submit(work, True)
        assert good.result() == [0, 2, 4]
        with pytest.raises(ZeroDivisionError, match="in backward"):
            bad.result()
        y = pool.submit(lambda: x + 1).result()
        pool.submit(loss.backward).result()
    assert (x + y).tolist() == [1, 5, 9]
    want = torch.arange(3.0)
    torch.testing.assert_close(leaf.grad.cpu(), 2 * want.sin() * want.cos())
