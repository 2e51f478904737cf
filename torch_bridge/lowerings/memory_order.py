"""Operators whose results have a memory order of their own in torch's CPU kernels.

An axis of length 1 has a stride too, which views of it read; and an array with gaps can be packed
in more than one order. There, torch's functions for `meta` tensors (`torch._refs`) give other
strides than its CPU kernels do. So these operators are registered by the rule of the kernel.

>>> row = torch.empty(2, 2, device="meta")[::2, 0]
>>> row.flip(0).stride(), as_cloned("aten::flip")(row, [0]).stride(), row.clone().stride()
((1,), (4,), (4,))
>>> as_contiguous("aten::tril")(torch.empty(1, 4, device="meta").t(), 0).stride()
(1, 1)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals import OpOverload

from .registry import lower

Shape = Callable[..., torch.Tensor]


def lower_cloned(*names: str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`lower` for operators whose result has the strides of a clone of the first tensor."""
    return _lower(as_cloned, names, options)


def lower_elementwise(
    *names: str, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`lower` for operators whose result has the strides of a sum of the tensors."""
    return _lower(as_elementwise, names, options)


def lower_contiguous(
    *names: str, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`lower` for operators whose result is contiguous, whatever the arguments are."""
    return _lower(as_contiguous, names, options)


def _lower(rule: Callable[[str], Shape], names: tuple[str, ...], options: dict[str, Any]) -> Any:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            lower(name, meta=rule(name), **options)(function)
        return function

    return register


def as_cloned(name: str) -> Shape:
    """The operator on `meta` tensors, with the strides of a clone of the first one.

    A `memory_format=` other than `torch.preserve_format` is obeyed.
    """

    def shape(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = _overload(name)(x, *args, **kwargs)
        if kwargs.get("memory_format") in (None, torch.preserve_format) and result.shape == x.shape:
            result = result.new_empty_strided(result.shape, torch.clone(x).stride())
        return result

    return shape


def as_contiguous(name: str) -> Shape:
    """The operator on `meta` tensors, with the strides of a contiguous tensor."""

    def shape(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = _overload(name)(*args, **kwargs)
        return result.new_empty(result.shape)

    return shape


def as_elementwise(name: str) -> Shape:
    """The operator on `meta` tensors, with the strides that torch's loop over elements chooses."""

    def shape(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = _overload(name)(*args, **kwargs)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        total = functools.reduce(torch.add, tensors) if len(tensors) > 1 else tensors[0] + 0
        return result.new_empty_strided(result.shape, total.stride())

    return shape


def as_images(name: str, position: int = 0) -> Shape:
    """The operator on `meta` tensors, contiguous, or channels last as argument `position`."""

    def shape(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = _overload(name)(*args, **kwargs)
        format = format_of(args[position]) or torch.contiguous_format
        return result.contiguous(memory_format=format)

    return shape


def format_of(x: torch.Tensor) -> torch.memory_format | None:
    """The channels-last memory format of a tensor of images; None if ambiguous or none."""
    format = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    fits = format is not None and x.is_contiguous(memory_format=format)
    return format if fits and not x.is_contiguous() else None


def _overload(name: str) -> OpOverload:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")
