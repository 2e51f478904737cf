"""Placeholders for the arguments of an operator call without their values.

>>> import torch
>>> Meta.of(torch.ones(2, 3))
Meta(size=(2, 3), stride=(3, 1), dtype=torch.float32)
>>> map_leaves(lambda leaf: Slot(leaf), [1, (2, 3)])
[Slot(index=1), (Slot(index=2), Slot(index=3))]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Meta(NamedTuple):
    """A tensor's size, stride and dtype.

    Attributes:
        size: the shape.
        stride: elements between neighbours along each axis.
        dtype: the logical torch dtype.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are in row-major order."""
        return self.tensor().is_contiguous()

    def tensor(self) -> torch.Tensor:
        """A `meta` tensor of this shape, stride and dtype."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")

    @staticmethod
    def of(tensor: torch.Tensor) -> Meta:
        """The meta of any strided tensor."""
        return Meta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


class Slot(NamedTuple):
    """Stands for the tensor argument with this number."""

    index: int


class Lift(NamedTuple):
    """Stands for the lifted float argument with this number."""

    index: int


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply `function` to the leaves of nested lists and tuples (`Slot` and `Lift` are leaves)."""
    if type(value) is list or type(value) is tuple:
        return type(value)(map_leaves(function, item) for item in value)
    return function(value)
