"""Python integers that a result's dtype cannot hold, where torch does not wrap them.

In arithmetic a number wraps as the tensor's own elements do. What fills memory or bounds it is
converted first, and refused if it does not fit.

>>> import torch
>>> torch.ones(2, dtype=torch.int32, device="jax").clamp(min=2**31)
Traceback (most recent call last):
...
RuntimeError: value cannot be converted to type int without overflow: aten.clamp.default, min=2147483648
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals import OpOverload

_BOUNDS = frozenset({"clamp", "clamp_min", "clamp_max"})
_FILLS = frozenset({"fill", "full", "full_like", "masked_fill", "index_fill", "scatter", "where"})
_FACTORS = frozenset({"alpha", "beta", "value"})
_LARGEST = torch.iinfo(torch.int64)


def check_range(op: OpOverload, named: Iterable[tuple[str, Any]], outs: Sequence[Any]) -> None:
    """Refuse integers as torch's kernels do.

    Args:
        op: a functional aten overload.
        named: its arguments.
        outs: a meta for each result.

    Raises:
        RuntimeError: a number does not fit.
    """
    out = outs[0].dtype if outs and outs[0] is not None else torch.bool
    if out.is_floating_point or out.is_complex or out == torch.bool:
        return
    kind = op.overloadpacket.__name__
    for name, value in named:
        limits = torch.iinfo(out) if kind in _BOUNDS or name == "alpha" else _LARGEST
        lowest = limits.min or -limits.max  # torch lets negative ones wrap in unsigned integers
        if type(value) is not int or lowest <= value <= limits.max:
            continue
        if kind in _BOUNDS or kind in _FILLS or name in _FACTORS:
            called = "int" if out == torch.int32 else str(out).removeprefix("torch.") + "_t"
            raise RuntimeError(
                f"value cannot be converted to type {called} without overflow: {op}, {name}={value}"
            )
