"""Functions of one operand, element by element, against CPU torch: at their ends, by dtype."""

import numpy as np
import torch

from tests.torch_bridge.lowerings.harness import evaluate, together
from tests.torch_bridge.lowerings.samples import (
    BOOLS,
    BYTES,
    COMPLEX,
    EMPTY,
    FLOATS,
    HALVES,
    INF,
    INTS,
    NAN,
    POSITIVE,
    SPECIAL,
    UNIT,
)

aten = torch.ops.aten

_SMOOTH = (
    "exp exp2 expm1 sin cos tan atan sinh cosh tanh asinh sigmoid erf erfc sinc deg2rad rad2deg i0 "
    "special_i0e special_i1 special_i1e special_log_ndtr special_erfcx reciprocal angle sgn abs neg"
).split()
_POSITIVE = "log log2 log10 log1p sqrt rsqrt lgamma digamma special_entr acosh".split()
_UNIT = "asin acos atanh erfinv logit special_ndtri".split()
_WHOLE = "floor ceil trunc round sign abs neg signbit".split()
_STEPS = [*_WHOLE, *"frac sgn isinf isnan isposinf isneginf".split()]


def test_float_functions_at_their_ends():
    with together() as check:
        for names, values in ((_SMOOTH, FLOATS), (_POSITIVE, POSITIVE), (_UNIT, UNIT)):
            for name in names:
                check(getattr(aten, name).default, SPECIAL)
                check(getattr(aten, name).default, values, rtol=1e-4)
        for eps in (None, 0.2):
            check(aten.logit.default, UNIT, eps)
        left = torch.tensor([-0.3, -1.6, -2.5, 0.0])
        check(aten.digamma.default, left, rtol=1e-4)


def test_float_functions_by_dtype():
    with together() as check:
        for name in ("exp", "sigmoid", "sqrt", "reciprocal", "erf"):
            for values in (INTS, BOOLS, BYTES):
                check(getattr(aten, name).default, values)
        for name in ("exp", "tanh", "sigmoid", "log1p", "erf"):
            check(getattr(aten, name).default, HALVES.abs(), rtol=1e-2)
        for name in "exp sin sqrt tanh abs angle sgn reciprocal".split():
            check(getattr(aten, name).default, COMPLEX)


def test_steps():
    with together() as check:
        for name in _STEPS:
            for values in (SPECIAL, FLOATS, EMPTY, *([INTS] if name in _WHOLE else [])):
                check(getattr(aten, name).default, values)
        check(aten.round.default, torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5]))  # half to even
        for decimals in (-2, 0, 2):
            x = torch.tensor([1.2345, -6.7891, 150.0, 250.0])
            check(aten.round.decimals, x, decimals=decimals)
        for given in ((), (7.0,), (None, 5.0, -5.0), (1.0, None, 0.0)):
            check(aten.nan_to_num.default, SPECIAL, *given)
        check(aten.nan_to_num.default, INTS)
        check(aten.nan_to_num.default, torch.tensor([NAN, INF, -INF]).bfloat16())
        for op in (aten.bitwise_not.default, aten.logical_not.default):
            for values in (INTS, BOOLS, BYTES):
                check(op, values)


def test_comparisons():
    with together() as check:
        for name in ("eq", "ne", "lt", "le", "gt", "ge"):
            for left, right in (
                (SPECIAL[:, None], SPECIAL),
                (INTS, torch.tensor([1.5, -2.0, 0.0, 5.0])),
                (INTS, torch.tensor(3.0)),
                (BOOLS, INTS),
                (HALVES, HALVES.flip(0)),
                (EMPTY, torch.zeros(4)),
            ):
                check(getattr(aten, name).Tensor, left, right)
            for number in (2, 2.5, 0, True):
                check(getattr(aten, name).Scalar, INTS, number)
                check(getattr(aten, name).Scalar, SPECIAL, number)


def test_the_sign_of_a_zero_is_a_zero_without_sign():
    x = torch.tensor([-0.0, 0.0, -2.0, float("nan")])
    for op in (aten.sign.default, aten.sgn.default):
        assert np.signbit(evaluate(op, x)[0]).tolist() == op(x).signbit().tolist()
