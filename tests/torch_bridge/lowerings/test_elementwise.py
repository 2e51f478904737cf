import numpy as np
import pytest
import torch

from tests.torch_bridge.lowerings.harness import check, evaluate
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
_CASES = ((_SMOOTH, FLOATS), (_POSITIVE, POSITIVE), (_UNIT, UNIT))


@pytest.mark.parametrize("name", _SMOOTH + _POSITIVE + _UNIT)
def test_edges_of_float_functions(name):
    check(getattr(aten, name).default, SPECIAL)


@pytest.mark.parametrize(
    ("name", "values"), [(name, values) for names, values in _CASES for name in names]
)
def test_float_functions(name, values):
    check(getattr(aten, name).default, values, rtol=1e-4)


@pytest.mark.parametrize("name", ["exp", "sigmoid", "sqrt", "reciprocal", "erf"])
@pytest.mark.parametrize("values", [INTS, BOOLS, BYTES], ids=["int64", "bool", "uint8"])
def test_integers_become_floats(name, values):
    check(getattr(aten, name).default, values)


@pytest.mark.parametrize("name", ["exp", "tanh", "sigmoid", "log1p", "erf"])
def test_halves(name):
    check(getattr(aten, name).default, HALVES.abs(), rtol=1e-2)


@pytest.mark.parametrize("name", _STEPS)
@pytest.mark.parametrize("values", [SPECIAL, FLOATS, EMPTY], ids=["special", "floats", "empty"])
def test_steps(name, values):
    check(getattr(aten, name).default, values)


@pytest.mark.parametrize("name", _WHOLE)
def test_steps_of_integers(name):
    check(getattr(aten, name).default, INTS)


def test_rounding_is_half_to_even():
    check(aten.round.default, torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5]))


@pytest.mark.parametrize("decimals", [-2, 0, 2])
def test_round_to_decimals(decimals):
    check(aten.round.decimals, torch.tensor([1.2345, -6.7891, 150.0, 250.0]), decimals=decimals)


@pytest.mark.parametrize("name", "exp sin sqrt tanh abs angle sgn reciprocal".split())
def test_complex(name):
    check(getattr(aten, name).default, COMPLEX)


@pytest.mark.parametrize("eps", [None, 0.2])
def test_logit(eps):
    check(aten.logit.default, UNIT, eps)


@pytest.mark.parametrize("given", [(), (7.0,), (None, 5.0, -5.0), (1.0, None, 0.0)])
def test_nan_to_num(given):
    check(aten.nan_to_num.default, SPECIAL, *given)


def test_nan_to_num_of_integers_and_halves():
    check(aten.nan_to_num.default, INTS)
    check(aten.nan_to_num.default, torch.tensor([NAN, INF, -INF]).bfloat16())


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_polygamma(n):
    check(aten.polygamma.default, n, POSITIVE, rtol=1e-4)


def test_digamma_and_trigamma_left_of_zero():
    values = torch.tensor([-0.3, -1.6, -2.5, 0.0])
    check(aten.digamma.default, values, rtol=1e-4)
    check(aten.polygamma.default, 1, values[:3], rtol=1e-4)


@pytest.mark.parametrize("name", ["bitwise_not", "logical_not"])
@pytest.mark.parametrize("values", [INTS, BOOLS, BYTES], ids=["int64", "bool", "uint8"])
def test_not(name, values):
    check(getattr(aten, name).default, values)


def test_the_sign_of_a_zero_is_a_zero_without_sign():
    x = torch.tensor([-0.0, 0.0, -2.0, float("nan")])
    for op in (aten.sign.default, aten.sgn.default):
        assert np.signbit(evaluate(op, x)[0]).tolist() == op(x).signbit().tolist()
