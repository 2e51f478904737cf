"""Windows that slide over the last axes of a tensor, by ONNX's attributes.

>>> windows_of((5,), (3,), strides=(2,), pads=(1, 1)).padding
((1, 1),)
>>> windows_of((6,), (3,), strides=(2,), ceil_mode=1).counts    # the last one hangs over the end
(3,)
"""

from __future__ import annotations

from collections.abc import Sequence

from isoshard.core.kit import WindowGrid, halves

from ...errors import ModelError
from .operator_arguments import choice

AUTO_PAD = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


def windows_of(
    sizes: Sequence[int],
    kernel: Sequence[int],
    auto_pad: str = "NOTSET",
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    ceil_mode: int = 0,
) -> WindowGrid:
    """The windows of one operator."""
    rank = len(sizes)
    choice(auto_pad, "auto_pad", AUTO_PAD)
    kernel = tuple(kernel)
    strides = tuple(strides or (1,) * rank)
    dilations = tuple(dilations or (1,) * rank)
    pads = tuple(pads or (0,) * (2 * rank))
    for role, values, length, least in (
        ("kernel_shape", kernel, rank, 1),
        ("strides", strides, rank, 1),
        ("dilations", dilations, rank, 1),
        ("pads", pads, 2 * rank, None),
    ):
        if len(values) != length or (least and min(values, default=1) < least):
            raise ModelError(
                f"{role} is {list(values)}, and {length} numbers"
                f"{f' of at least {least}' if least else ''} are wanted for {rank} axes"
            )
    padding = tuple(zip(pads[:rank], pads[rank:], strict=True))
    if auto_pad == "VALID":
        padding = ((0, 0),) * rank
    elif auto_pad != "NOTSET":
        padding = tuple(
            _same(size, d * (k - 1) + 1, step, auto_pad)
            for size, k, d, step in zip(sizes, kernel, dilations, strides, strict=True)
        )
    return WindowGrid(tuple(sizes), kernel, strides, dilations, padding, bool(ceil_mode))


def _same(size: int, reach: int, step: int, auto_pad: str) -> tuple[int, int]:
    total = max((-(-size // step) - 1) * step + reach - size, 0)
    return halves(total, more_before=auto_pad == "SAME_LOWER")
