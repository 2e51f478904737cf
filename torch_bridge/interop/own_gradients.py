"""`torch.autograd.Function`s inside `jax_function` keep the backward that they define.

JAX differentiates what it traces, so a function that a user gave another gradient (a straight-
through estimator, a reversed gradient) would silently lose it. Here each call of such a
function is a `jax.custom_vjp`, whose rules run the class's own `forward` and `backward`:

>>> import jax, torch, isoshard as iso
>>> __name__ = "yours"                                     # in a module outside of isoshard
>>> class Rounded(torch.autograd.Function):
...     @staticmethod
...     def forward(ctx, x):
...         return x.round()
...     @staticmethod
...     def backward(ctx, gradient):
...         return gradient
>>> f = iso.jax_function(Rounded.apply)
>>> jax.grad(lambda x: (3 * f(x)).sum())(jax.numpy.array([0.4, 1.6])).tolist()
[3.0, 3.0]

As with every `jax.custom_vjp`, forward-mode derivatives are refused, and what `forward` takes from
around it besides its arguments has no gradient. `ctx.needs_input_grad` is True for every floating
argument. Classes that define no backward, torch's own activation checkpointing, and functions of
isoshard that only lay out, are differentiated by JAX.

Touches `torch.autograd.Function.apply`, which is taken over once; elsewhere a call costs one look
at a variable of the thread. Up to torch 2.13 it is Python, and gets other code when `jax_function`
is first called. In torch 2.15 it is a builtin, which is put behind another method when the bridge
is imported; `BackwardCFunction.__init__` then refuses, inside `jax_function`, one that was bound
before. Tested with torch 2.10, 2.13 and 2.15.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals.tensor_fields import function_of
from isoshard.torch_bridge.argument_types import AutogradFunction, Opaque
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes

from .autograd_rule import called, pull_of

_DIFFERENTIABLE_BY_JAX = ("isoshard.", "torch.utils.checkpoint")


class _RulesHere(threading.local):
    depth = 0
    passes = False  # torch's own `apply` is meant to run


_THREAD = _RulesHere()


@contextlib.contextmanager
def honoured() -> Iterator[None]:
    """Context in which functions called on this thread keep their own backward under JAX."""
    if not _ORIGINAL:
        _install()
    _THREAD.depth += 1
    try:
        yield
    finally:
        _THREAD.depth -= 1


def _install() -> None:
    """Take `Function.apply` over: where it is Python, its code, so that bound methods follow."""
    Function: Any = torch.autograd.Function
    function = getattr(Function.apply, "__func__", None)
    held = None

    def instead(cls: Any, *args: Any, **kwargs: Any) -> Any:
        from isoshard.torch_bridge.interop import own_gradients

        return own_gradients.applied(cls, args, kwargs, held)

    if function is None:
        _ORIGINAL.append(functools.partial(_builtin, vars(Function)["apply"]))
        Function.apply = classmethod(instead)
        backward_class: Any = torch.autograd.function.BackwardCFunction
        backward_class.__init__ = _refuse_early
        return
    _ORIGINAL.append(
        types.FunctionType(
            function.__code__, function.__globals__, "apply", closure=function.__closure__
        )
    )
    function.__code__ = instead.__code__


_ORIGINAL: list[Callable[..., Any]] = []


def _builtin(method: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    return method.__get__(None, cls)(*args, **kwargs)


def _refuse_early(context: Any) -> None:
    """Raise when a builtin `apply` that was bound before is called: its gradient would be lost."""
    if _THREAD.depth and not _THREAD.passes and _is_own(cls := function_of(type(context))):
        raise RuntimeError(
            f"{cls.__name__}.apply was given another name before isoshard.torch_bridge was "
            "imported, and jax_function cannot see such calls in this torch; import "
            f"isoshard.torch_bridge first, or call {cls.__name__}.apply(..)"
        )


def applied(cls: AutogradFunction, args: tuple[Any, ...], kwargs: dict[str, Any], _: Opaque) -> Any:
    """What `Function.apply` does on a class.

    Args:
        cls: the class.
        args: of the call.
        kwargs: likewise.
        _: the free variable of torch's code, which the one instead of it has to have as well.
    """
    if not _THREAD.depth:
        return _ORIGINAL[0](cls, *args, **kwargs)
    if _is_meant(cls, args):
        return called(cls, args, kwargs)
    before, _THREAD.passes = _THREAD.passes, True
    try:
        return _ORIGINAL[0](cls, *args, **kwargs)
    finally:
        _THREAD.passes = before


def _is_own(cls: Any) -> bool:
    """Whether a class defines a gradient that JAX would not find."""
    named = f"{cls.__module__}."
    return not named.startswith(_DIFFERENTIABLE_BY_JAX) and bool(pull_of(cls))


def _is_meant(cls: Any, args: Sequence[Any]) -> bool:
    if not isinstance(tapes.recorder(), tapes.Immediate):
        return False
    tensors = [one for one in args if isinstance(one, lazy_tensor.LazyTensor)]
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
        return False  # the code differentiates by torch, inside
    return bool(tensors) and _is_own(cls)


if not hasattr(torch.autograd.Function.apply, "__func__"):
    _install()  # before functions are given other names
