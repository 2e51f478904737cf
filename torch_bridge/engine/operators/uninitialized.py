"""The content of memory that was never written.

It is zeros, as JAX has no other. Where torch is asked for deterministic algorithms, and to fill
such memory, it is what torch fills it with, so that what reads it by mistake shows.

>>> content(torch.float32)
0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import deterministic

from . import dispatch

aten = torch.ops.aten

FACTORIES = (
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_permuted.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
"""Operators that make memory and write nothing to it."""


def content(dtype: torch.dtype) -> float | int | bool:
    """The number in every place of new memory."""
    if not (torch.are_deterministic_algorithms_enabled() and _fills()):
        return 0
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _fills() -> bool:
    return deterministic.fill_uninitialized_memory  # pyrefly: ignore[missing-attribute]


def fill(tensor: torch.Tensor) -> torch.Tensor:
    """The new tensor, with `content` in every place."""
    if torch.are_deterministic_algorithms_enabled():
        value = content(tensor.dtype)
        if value:
            dispatch.handle(aten.fill_.Scalar, (tensor, value), {})
    return tensor


def filled(handler: Callable[..., Any]) -> Callable[..., Any]:
    """A handler of one of the `FACTORIES` whose result is filled with `content`."""
    return lambda args, kwargs: fill(handler(args, kwargs))
