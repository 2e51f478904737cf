"""Windows that slide over the last axes of a tensor: their padding and number.

>>> Windows((5,), (3,), strides=(2,), pads=(1, 1)).padding
((1, 1),)
>>> Windows((6,), (3,), strides=(2,), ceil_mode=1).counts    # the last one hangs over the end
(3,)
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ModelError
from .operator_arguments import choice

AUTO_PAD = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


class Windows:
    """The windows of one operator.

    Args:
        sizes: of the spatial axes.
        kernel: size of a window along each.
        strides: from one window to the next; ones if left out.
        dilations: from one element of a window to the next; ones if left out.
        pads: before each axis, then after each; zeros if left out.
        auto_pad: "NOTSET": as `pads` says; "VALID": none; "SAME_UPPER", "SAME_LOWER": as much as
            ceil(size / stride) windows need, an odd one after or before.
        ceil_mode: a last window may hang over the end, if it begins before the padding there.

    Attributes:
        kernel: as given.
        strides: one per axis.
        dilations: one per axis.
        padding: (before, after) per axis, without what hangs over.
        counts: windows per axis.
        hanging: what the last window needs after the padding, per axis.

    Raises:
        ModelError: a list has another length than the axes, or a number makes no sense.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        kernel: Sequence[int],
        *,
        strides: Sequence[int] | None = None,
        dilations: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        auto_pad: str = "NOTSET",
        ceil_mode: int = 0,
    ) -> None:
        """Work the padding out."""
        rank = len(sizes)
        choice(auto_pad, "auto_pad", AUTO_PAD)
        self.kernel = tuple(kernel)
        self.strides = tuple(strides or (1,) * rank)
        self.dilations = tuple(dilations or (1,) * rank)
        pads = tuple(pads or (0,) * (2 * rank))
        for what, values, length, least in (
            ("kernel_shape", self.kernel, rank, 1),
            ("strides", self.strides, rank, 1),
            ("dilations", self.dilations, rank, 1),
            ("pads", pads, 2 * rank, None),
        ):
            if len(values) != length or (least and min(values, default=1) < least):
                raise ModelError(
                    f"{what} is {list(values)}, and {length} numbers"
                    f"{f' of at least {least}' if least else ''} are wanted for {rank} axes"
                )
        reach = [d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]
        if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            self.padding = tuple(
                _same(size, k, step, auto_pad)
                for size, k, step in zip(sizes, reach, self.strides, strict=True)
            )
        elif auto_pad == "VALID":
            self.padding = ((0, 0),) * rank
        else:
            self.padding = tuple(zip(pads[:rank], pads[rank:], strict=True))
        counts, hanging = [], []
        for size, k, step, (before, after) in zip(
            sizes, reach, self.strides, self.padding, strict=True
        ):
            room = size + before + after - k
            count = (-(-room // step) if ceil_mode else room // step) + 1
            if ceil_mode and (count - 1) * step >= size + before:
                count -= 1
            counts.append(count)
            hanging.append(max((count - 1) * step + k - size - before - after, 0))
        self.counts, self.hanging = tuple(counts), tuple(hanging)

    @property
    def over_images(self) -> dict[str, tuple]:
        """The keyword arguments of `lax.reduce_window` for `(batch, channels, *spatial)`."""
        ends = zip(self.padding, self.hanging, strict=True)
        return {
            "window_dimensions": (1, 1, *self.kernel),
            "window_strides": (1, 1, *self.strides),
            "window_dilation": (1, 1, *self.dilations),
            "padding": ((0, 0), (0, 0), *((a, b + more) for (a, b), more in ends)),
        }


def _same(size: int, reach: int, step: int, auto_pad: str) -> tuple[int, int]:
    total = max((-(-size // step) - 1) * step + reach - size, 0)
    less = total // 2
    return (less, total - less) if auto_pad == "SAME_UPPER" else (total - less, less)
