"""Calls that torch's database has no sample of: convolutions in many groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.testing._internal.opinfo.core import SampleInput


@dataclasses.dataclass
class Case:
    """What `rows` and `sent` ask of an entry of the database, for one call.

    Attributes:
        function: what is called.
        shapes: of its operands, the first of them of one row.
        options: its keywords.
    """

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    options: dict[str, Any]
    supports_autograd: bool = True

    def __call__(self, *operands: Any, **options: Any) -> Any:
        """Call it."""
        return self.function(*operands, **options)

    def sample_inputs(
        self, device: str, dtype: torch.dtype, requires_grad: bool = False, **_: Any
    ) -> Iterator[SampleInput]:
        """The one sample."""
        first, *others = (
            torch.randn(shape, dtype=dtype, device=device).requires_grad_(requires_grad)
            for shape in self.shapes
        )
        yield SampleInput(first, args=tuple(others), kwargs=self.options)


def _conv(function: Any, groups: int, channels: int, rank: int = 2, **options: Any) -> Case:
    kernel = (channels, channels // groups, *(3,) * rank)
    shapes = (1, channels, *(6,) * rank), kernel
    return Case(function, shapes, {"groups": groups, "padding": 1, **options})


OWN: dict[str, Any] = {
    "conv1d in 8 groups of 16": _conv(F.conv1d, 8, 16, 1),
    "conv2d in 8 groups of 16": _conv(F.conv2d, 8, 16),
    "conv2d in 16 groups of 32": _conv(F.conv2d, 16, 32, stride=2),
    "conv2d, depthwise": _conv(F.conv2d, 16, 16),
    "conv3d in 8 groups of 16": _conv(F.conv3d, 8, 16, 3),
    "conv_transpose2d in 8 groups of 16": _conv(F.conv_transpose2d, 8, 16, stride=2),
}
"""By their names in the table."""
