"""Checks of floats that are inputs of a program, and so another number at each call.

Such a float is no part of a call's signature, so what is known of the signature says nothing of
it: rates and deviations of random draws, and factors and values that a dtype must hold. An
operator that looks at one gets a check here, made with the signature, which every call runs.

>>> from isoshard.torch_bridge.engine.values.metas import Lift, Meta
>>> model = Meta((2,), (1,), torch.float32)
>>> check = find(torch.ops.aten.exponential.default, (model, Lift(0)), {}, (model,))
>>> check([0.5])
>>> check([-1.0])
Traceback (most recent call last):
...
RuntimeError: exponential_ expects lambda > 0.0, but found lambda=-1
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from isoshard.torch_bridge._torch_internals import OpOverload, schema_of
from isoshard.torch_bridge.engine.recording.recipes import Check
from isoshard.torch_bridge.engine.values.metas import Lift, Meta
from isoshard.torch_bridge.engine.values.symbolic_numbers import present


def find(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], metas: tuple[Meta, ...]
) -> Check | None:
    """The check of a call's lifted floats, or None where torch takes any.

    Returns:
        A function of the lifted floats that raises `RuntimeError` for one that torch rejects.
    """
    schema = schema_of(op)
    name = schema.name.removeprefix("aten::")
    if name not in _PARAMETERS and name not in _CONVERTED and name != "uniform":
        return None
    named = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
    if name == "uniform":
        return _range(named, metas[0])
    if name in _PARAMETERS:
        parameter = _PARAMETERS[name]
        lift = named.get(parameter.argument)
        return _parameter_check(parameter, lift.index) if isinstance(lift, Lift) else None
    indices = tuple(_lift_indices([named.get(argument) for argument in _CONVERTED[name].arguments]))
    return _range_check(indices, _converted_to(name, named, metas)) if indices else None


class _Parameter(NamedTuple):
    """A parameter of a distribution."""

    argument: str
    allows: Callable[[float], bool]
    refusal: str


def _positive(value: float) -> bool:
    return value > 0


_DEVIATION = _Parameter(
    "std", lambda std: std >= 0, "normal expects std >= 0.0, but found std {:g}"
)
_PARAMETERS = {
    "exponential": _Parameter(
        "lambd", _positive, "exponential_ expects lambda > 0.0, but found lambda={:g}"
    ),
    "cauchy": _Parameter("sigma", _positive, "cauchy_ expects sigma > 0.0, but found sigma={:g}"),
    "log_normal": _Parameter("std", _positive, "log_normal_ expects std > 0.0, but found std={:g}"),
    "geometric": _Parameter(
        "p", lambda p: 0 < p < 1, "geometric_ expects p to be in (0, 1), but got p={:g}"
    ),
    "bernoulli": _Parameter(
        "p", lambda p: 0 <= p <= 1, "bernoulli_ expects p to be in [0, 1], but got p={:g}"
    ),
    "normal": _DEVIATION,
    "normal_functional": _DEVIATION,
}


def _parameter_check(parameter: _Parameter, index: int) -> Check:
    def check(scalars: Sequence[Any]) -> None:
        value = present(scalars[index])
        if not parameter.allows(value):
            raise RuntimeError(parameter.refusal.format(value))

    return check


def _range(named: dict[str, Any], model: Meta) -> Check | None:
    """The check of the two ends between which uniform numbers are drawn."""
    if model.dtype.is_complex and 0 in model.size:
        return None
    low, high = named.get("from", 0.0), named.get("to", 1.0)
    dtype = model.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return None
    most = torch.finfo(dtype).max

    def check(scalars: Sequence[Any]) -> None:
        ends = [present(scalars[e.index]) if isinstance(e, Lift) else e for e in (low, high)]
        for argument, end in zip(("from", "to"), ends, strict=True):
            if not -most <= end <= most:
                raise RuntimeError(f"{argument} is out of bounds for {dtype}, got {end:g}")
        start, end = ends
        if start > end:
            raise RuntimeError(
                "uniform_ expects to return a [from, to) range, but found "
                f"from={start:g} > to={end:g}"
            )
        if end - start > most:
            raise RuntimeError(
                f"uniform_ expects to-from <= {most:g}, the most that {dtype} holds, but found "
                f"to={end:g} and from={start:g}"
            )

    return check


class _Conversion(NamedTuple):
    """Arguments that torch converts to the dtype of a computation.

    Attributes:
        arguments: their names.
        of_first: the dtype is the first tensor's, whatever the other tensors are.
        halves: what torch checks 16-bit floats by: "own", "float32", or "" for nothing.
    """

    arguments: tuple[str, ...]
    of_first: bool = False
    halves: str = "own"


_VALUE = _Conversion(("value", "fill_value"), of_first=True)
_ALPHA = _Conversion(("alpha",))
_SCALARS = _Conversion(("scalar", "scalars"))
_WIDE = _Conversion(("alpha", "beta", "value", "scalars", "weight"), halves="float32")
_CONVERTED = {
    **dict.fromkeys(("fill", "full", "full_like", "new_full", "masked_fill"), _VALUE),
    **dict.fromkeys(("scatter", "index_fill", "fill_diagonal_"), _VALUE),
    **dict.fromkeys(("add", "sub", "rsub", "_foreach_add", "_foreach_sub"), _ALPHA),
    **dict.fromkeys(("_foreach_clamp_min", "_foreach_clamp_max"), _SCALARS),
    **dict.fromkeys(("_foreach_maximum", "_foreach_minimum"), _SCALARS),
    **dict.fromkeys(("addmv", "addr"), _Conversion(("alpha", "beta"))),
    "index_add": _Conversion(("alpha",), of_first=True),
    **dict.fromkeys(("linspace", "logspace"), _Conversion(("start", "end"))),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addcmul", "addcdiv", "lerp"), _WIDE),
    **dict.fromkeys(("_foreach_addcmul", "_foreach_addcdiv", "_foreach_lerp"), _WIDE),
    "scalar_tensor": _Conversion(("s",), halves=""),
    "where": _Conversion(("self", "other"), halves=""),
}


def _lift_indices(values: Any) -> list[int]:
    """The numbers of the lifted floats among arguments, also inside lists."""
    indices: list[int] = []
    for value in values:
        if isinstance(value, Lift):
            indices.append(value.index)
        elif type(value) in (list, tuple):
            indices += _lift_indices(value)
    return indices


def _converted_to(name: str, named: dict[str, Any], metas: tuple[Meta, ...]) -> torch.dtype | None:
    """The dtype that must represent a number; None where torch does not check.

    A number alone of 16 bits is filled when torch makes a tensor of a number, which rounds.
    """
    how = _CONVERTED[name]
    dtypes = [meta.dtype for meta in metas]
    if name == "where":
        dtypes = dtypes[1:]  # without the condition's
    dtype = named.get("dtype")
    if not isinstance(dtype, torch.dtype):
        if how.of_first and dtypes:
            dtype = dtypes[0]
        else:
            floats = any(isinstance(named.get(operand), Lift) for operand in ("self", "other"))
            kinds = [torch.get_default_dtype()] if floats or not dtypes else []
            dtype = functools.reduce(torch.promote_types, dtypes or kinds)
            if kinds and not (dtype.is_floating_point or dtype.is_complex):
                (dtype,) = kinds
    if dtype.is_floating_point and dtype.itemsize == 2:
        halves = "" if name == "fill" and not metas[0].size else how.halves
        return {"own": dtype, "float32": torch.float32}.get(halves)
    if name in ("lerp", "_foreach_lerp") and not (dtype.is_floating_point or dtype.is_complex):
        return None  # rejected for the dtype
    return dtype


def _range_check(indices: tuple[int, ...], dtype: torch.dtype | None) -> Check | None:
    """A check that a dtype can represent numbers; None for one that represents all."""
    if dtype is None or dtype in (torch.bool, torch.float64, torch.complex128):
        return None
    real = dtype.is_floating_point or dtype.is_complex
    bounds = torch.finfo(dtype) if real else torch.iinfo(dtype)
    least, most = float(bounds.min), float(bounds.max)

    def check(scalars: Sequence[Any]) -> None:
        for index in indices:
            value = scalars[index]
            if type(value) is not float:
                value = present(value)
            if not least <= value <= most and not (real and not math.isfinite(value)):
                raise RuntimeError(
                    f"value cannot be converted to type {dtype} without overflow, got {value:g}"
                )

    return check
