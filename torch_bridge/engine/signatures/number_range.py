"""Numbers that a result's dtype cannot represent, where torch does not wrap or round them.

In arithmetic an integer wraps as the tensor's own elements do. What fills memory or bounds it is
converted first, and rejected if it does not fit. From 2.15 on torch takes an integer's bound that no
element can pass.

>>> import torch
>>> torch.ones(2, device="jax").clamp(max=1e39)
Traceback (most recent call last):
...
RuntimeError: value cannot be converted to type float without overflow: aten.clamp.default, max=1e+39
"""  # noqa: E501

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from isoshard.core.runtime.private_names import release
from isoshard.torch_bridge._torch_internals import OpOverload, schema_of

_LOWER = frozenset({"clamp_min", "_foreach_clamp_min", "_foreach_maximum"})
_UPPER = frozenset({"clamp_max", "_foreach_clamp_max", "_foreach_minimum"})
_BOTH = frozenset({"clamp", "hardtanh"})
_BOUNDS = _LOWER | _UPPER | _BOTH
_FILLS = frozenset({"fill", "full", "full_like", "masked_fill", "index_fill", "scatter", "where"})
FACTORS = frozenset({"alpha", "beta", "value"})
"""Number arguments that scale a term, and do not take part in type promotion."""
_LARGEST = torch.iinfo(torch.int64)
_TAKES_IDLE_BOUNDS = release(torch.__version__) >= (2, 15)


def in_range(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], outs: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Reject numbers as torch's kernels do.

    Returns:
        The arguments; a bound that no element can pass is the dtype's own.

    Raises:
        RuntimeError: a number does not fit.
    """
    kind = op.overloadpacket.__name__
    dtypes = {out.dtype for out in outs if out is not None} or {torch.bool}
    check = _bound if kind in _BOUNDS else _checked_number
    fitted = functools.partial(check, op, kind, dtypes)
    names = [argument.name for argument in schema_of(op).arguments]
    return (
        tuple(fitted(name, value) for name, value in zip(names, args, strict=False)),
        {name: fitted(name, value) for name, value in kwargs.items()},
    )


def _checked_number(
    op: OpOverload, kind: str, dtypes: set[torch.dtype], name: str, value: Any
) -> Any:
    if type(value) is not int or not (kind in _FILLS or name in FACTORS):
        return value
    for dtype in filter(_is_integer, dtypes):
        limits = torch.iinfo(dtype) if name == "alpha" else _LARGEST
        if not _lowest(limits) <= value <= limits.max:
            raise _overflow(op, name, value, dtype)
    return value


def _bound(op: OpOverload, kind: str, dtypes: set[torch.dtype], name: str, value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_bound(op, kind, dtypes, name, bound) for bound in value)
    if type(value) not in (int, float) or not math.isfinite(value):
        return value
    is_lower = kind in _LOWER or (kind in _BOTH and name.startswith("min"))
    for dtype in dtypes:
        if dtype == torch.bool or dtype.is_complex:
            continue
        limits = torch.iinfo(dtype) if _is_integer(dtype) else torch.finfo(dtype)
        if not _is_integer(dtype) or not _TAKES_IDLE_BOUNDS:
            if not _lowest(limits) <= value <= limits.max:
                raise _overflow(op, name, value, dtype)
            continue
        idle = value < limits.min if is_lower else value > limits.max
        if idle and len(dtypes) == 1:
            return limits.min if is_lower else limits.max
        if not limits.min <= value <= limits.max:
            raise _overflow(op, name, value, dtype)
    return value


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _lowest(limits: Any) -> float:
    """The lowest number that is taken: negative ones wrap in unsigned integers."""
    return limits.min or -limits.max


def _overflow(op: OpOverload, name: str, value: Any, dtype: torch.dtype) -> RuntimeError:
    called = "int" if dtype == torch.int32 else str(dtype).removeprefix("torch.") + "_t"
    called = str(dtype) if dtype.is_floating_point else called
    return RuntimeError(
        f"value cannot be converted to type {called} without overflow: {op}, {name}={value}"
    )
