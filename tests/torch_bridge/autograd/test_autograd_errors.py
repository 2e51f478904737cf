"""Errors arrive as exceptions wherever they are raised, all in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

functional = torch.nn.functional


class BadBackward(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("in backward")


class BadShape(torch.autograd.Function):
    """Gives a gradient of the wrong shape."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return torch.ones(7, device="jax")


class Missing(torch.autograd.Function):
    """Meets an operator without a lowering, inside dispatch, during backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return torch.ops.isoshard_autograd_tests.nothing(g)


class BadForward(torch.autograd.Function):
    """Raises in forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("in forward")

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


@torch.library.custom_op("isoshard_autograd_tests::nothing", mutates_args=(), device_types="cpu")
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


def _tensor_hook(x: torch.Tensor) -> None:
    y = x * 2
    y.register_hook(_raise("in a hook"))
    y.sum().backward()


def _module_hook(x: torch.Tensor) -> None:
    layer = torch.nn.Linear(3, 2).to("jax")
    layer.register_full_backward_hook(_raise("in a module hook"))
    layer(x).sum().backward()


def _forward_hook(x: torch.Tensor) -> None:
    layer = torch.nn.Linear(3, 2).to("jax")
    layer.register_forward_hook(_raise("in a forward hook"))
    layer(x)


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


ERRORS: dict[str, tuple[Callable[[torch.Tensor], Any], type[Exception], str]] = {
    "forward": (lambda x: BadForward.apply(x), ZeroDivisionError, "in forward"),
    "backward": (lambda x: BadBackward.apply(x).sum().backward(), ZeroDivisionError, "in backward"),
    "gradient of the wrong shape": (
        lambda x: BadShape.apply(x).sum().backward(),
        RuntimeError,
        r"invalid gradient at index 0",
    ),
    "dispatch in backward": (
        lambda x: Missing.apply(x).sum().backward(),
        NotImplementedError,
        r"register_lowering",
    ),
    "dispatch in forward": (
        lambda x: torch.ops.isoshard_autograd_tests.nothing(x.detach()),
        NotImplementedError,
        r"register_lowering",
    ),
    "shapes in forward": (lambda x: x @ torch.ones(9, device="jax"), RuntimeError, r"size|shape"),
    "no scalar": (lambda x: (x * 2).backward(), RuntimeError, r"only for scalar outputs"),
    "no gradient": (lambda x: x.detach().sum().backward(), RuntimeError, r"does not require grad"),
    "tensor hook": (_tensor_hook, ZeroDivisionError, "in a hook"),
    "module hook": (_module_hook, ZeroDivisionError, "in a module hook"),
    "forward hook": (_forward_hook, ZeroDivisionError, "in a forward hook"),
    "recomputation": (_checkpointed, ZeroDivisionError, "in recomputation"),
    "post accumulate hook": (_post_accumulate, ZeroDivisionError, "after accumulation"),
    "optimizer hook": (_step_hook, ZeroDivisionError, "before the step"),
    "integer gradient": (
        lambda x: torch.ones(3, dtype=torch.int64, device="jax").requires_grad_(),
        RuntimeError,
        r"floating point",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_arrives_as_an_exception_and_work_goes_on(name):
    function, error, message = ERRORS[name]
    for _ in range(3):
        x = torch.arange(3.0).to("jax").requires_grad_()
        with pytest.raises(error, match=message):
            function(x)
        x.grad = None
        x._backward_hooks = None
        y = x.detach().requires_grad_()
        (y * y).sum().backward()
        assert y.grad.tolist() == [0, 2, 4]


def test_an_error_on_another_thread_arrives_there():
    import concurrent.futures

    def work(fail: bool) -> list[float]:
        x = torch.arange(3.0).to("jax").requires_grad_()
        y = BadBackward.apply(x) if fail else x * x
        y.sum().backward()
        return x.grad.tolist()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        good, bad = pool.submit(work, False), pool.submit(work, True)
        assert good.result() == [0, 2, 4]
        with pytest.raises(ZeroDivisionError, match="in backward"):
            bad.result()


def test_a_tensor_recorded_on_one_thread_can_be_used_on_another():
    import concurrent.futures

    x = torch.arange(3.0).to("jax") * 2
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        y = pool.submit(lambda: x + 1).result()
    assert (x + y).tolist() == [1, 5, 9]
