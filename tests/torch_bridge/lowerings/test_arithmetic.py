import jax
import numpy as np
import pytest
import torch

from isoshard.torch_bridge.engine.signatures.bound_op import build_call
from isoshard.torch_bridge.engine.signatures.shape_inference import infer
from isoshard.torch_bridge.engine.values.metas import Lift, Meta, Slot
from tests.torch_bridge.lowerings.harness import check, to_array
from tests.torch_bridge.lowerings.samples import (
    BOOLS,
    BYTES,
    COMPLEX,
    DIVISORS,
    EMPTY,
    FLOATS,
    HALVES,
    INF,
    INT_SCALAR,
    INTS,
    NAN,
    POSITIVE,
    ROW,
    SCALAR,
    SPECIAL,
)

aten = torch.ops.aten

# Operands that exercise promotion and broadcasting.
_PAIRS = {
    "floats": (FLOATS, ROW),
    "ints": (INTS, DIVISORS),
    "int-float": (INTS, ROW),
    "0-d float": (INTS, SCALAR),
    "0-d int": (FLOATS, INT_SCALAR),
    "halves": (HALVES, HALVES.flip(0) + 3),
    "half-0-d": (HALVES, SCALAR),
    "column": (FLOATS, FLOATS[:, :1]),
    "empty": (EMPTY, ROW),
    "number": (FLOATS, 1.5),
    "int-number": (INTS, 2),
    "int-float-number": (INTS, 2.5),
}
_SPECIAL_PAIR = (SPECIAL[:, None], SPECIAL)


def _pairs(*left_out):
    kept = {name: pair for name, pair in _PAIRS.items() if name not in left_out}
    return pytest.mark.parametrize("pair", kept.values(), ids=kept.keys())


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
@_pairs()
def test_arithmetic(name, pair):
    check(getattr(aten, name).Tensor, *pair, rtol=1e-2 if pair[0] is HALVES else 2e-5)


@pytest.mark.parametrize("name", ["add", "sub", "rsub"])
def test_alpha(name):
    op = getattr(aten, name).Tensor
    check(op, FLOATS, ROW, alpha=2.5)
    check(op, INTS, DIVISORS, alpha=3)


@pytest.mark.parametrize("name", ["add", "mul"])
def test_bools(name):
    check(getattr(aten, name).Tensor, BOOLS, BOOLS[0])
    check(getattr(aten, name).Tensor, BOOLS, INTS)


@pytest.mark.parametrize("name", ["add", "mul", "div", "sub"])
def test_complex(name):
    check(getattr(aten, name).Tensor, COMPLEX, ROW)
    check(getattr(aten, name).Tensor, COMPLEX, 1.5)


@pytest.mark.parametrize("mode", [None, "floor", "trunc"])
@_pairs("empty")
def test_division_modes(mode, pair):
    check(aten.div.Tensor_mode, *pair, rounding_mode=mode, rtol=1e-2 if pair[0] is HALVES else 2e-5)


@pytest.mark.parametrize("name", ["floor_divide", "remainder.Tensor", "fmod.Tensor"])
@_pairs("halves", "half-0-d", "number", "int-number", "int-float-number")
def test_whole_division(name, pair):
    packet, _, overload = name.partition(".")
    check(getattr(getattr(aten, packet), overload or "default"), *pair)


@pytest.mark.parametrize("name", ["floor_divide", "remainder", "fmod"])
@pytest.mark.parametrize("number", [2, -3, 2.5, -0.7])
def test_whole_division_by_a_number(name, number):
    check(getattr(aten, name).Scalar, INTS, number)
    check(getattr(aten, name).Scalar, FLOATS, number)


@pytest.mark.parametrize("name", ["maximum", "minimum", "fmax", "fmin"])
@_pairs("number", "int-number", "int-float-number")
def test_extremes(name, pair):
    check(getattr(aten, name).default, *pair)


@pytest.mark.parametrize(
    "name",
    "div.Tensor floor_divide remainder.Tensor fmod.Tensor maximum minimum fmax fmin atan2 hypot "
    "copysign.Tensor pow.Tensor_Tensor logaddexp logaddexp2 xlogy.Tensor special_xlog1py heaviside "
    "nextafter".split(),
)
def test_special_values(name):
    packet, _, overload = name.partition(".")
    check(getattr(getattr(aten, packet), overload or "default"), *_SPECIAL_PAIR)


@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_special_values_of_division_modes(mode):
    check(aten.div.Tensor_mode, *_SPECIAL_PAIR, rounding_mode=mode)


def test_bytes_wrap():
    check(aten.add.Tensor, BYTES, BYTES)
    check(aten.sub.Tensor, BYTES, BYTES.flip(0))


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, -1, -2, 0.5, -0.5, 1.5, 2.0, 5])
@pytest.mark.parametrize("values", [FLOATS, SPECIAL, INTS], ids=["floats", "special", "ints"])
def test_pow_by_a_number(values, exponent):
    if values is INTS and exponent < 0 and isinstance(exponent, int):
        values = INTS.abs().add(1).float()
    check(aten.pow.Tensor_Scalar, values, exponent)


@pytest.mark.parametrize("exponent", [1 + 2j, 0.5j, 3 - 1j, 2 + 0j, 0.5 + 0j, 0j])
@pytest.mark.parametrize("base", ["complex", "float"])
def test_complex_powers_of_zero_are_zero(base, exponent):
    values = torch.tensor([0j, complex(-0.0, 0), 1j, 2 + 3j, complex(NAN, 0)])
    values = values if base == "complex" else torch.tensor([0.0, -0.0, -2.0, 3.0, NAN])
    same = torch.full((5,), exponent)
    check(aten.pow.Tensor_Scalar, values, exponent)
    check(aten.pow.Tensor_Tensor, values, same)
    check(aten.pow.Scalar, exponent, values)
    check(aten.pow.Scalar, 0.0, values + 0j)


@pytest.mark.parametrize("exponent", [True, False, 2, 2.5])
def test_powers_of_bools(exponent):
    check(aten.pow.Tensor_Scalar, BOOLS, exponent)


@pytest.mark.parametrize("base", [1, 3, 2.5, 1 + 2j])
def test_powers_of_a_number_lie_in_row_major_order(base):
    def power(device):
        return base ** torch.arange(24).reshape(2, 3, 4).to(device).permute(2, 0, 1)

    assert power("jax").stride() == power("cpu").stride() == (6, 3, 1)


def test_pow_of_halves_is_rounded_once():
    check(aten.pow.Tensor_Scalar, HALVES, 3, rtol=4e-3)


def test_pow_of_integers():
    base, exponent = torch.tensor([2, -3, 1, -1, -1, 0, 5]), torch.tensor([5, 3, -2, -2, -3, 0, -1])
    check(aten.pow.Tensor_Tensor, base, exponent)
    check(aten.pow.Scalar, 3, torch.tensor([0, 1, 4]))
    check(aten.pow.Scalar, 2.5, INTS)


@pytest.mark.parametrize("name", ["bitwise_and", "bitwise_or", "bitwise_xor"])
def test_bits(name):
    packet = getattr(aten, name)
    check(packet.Tensor, INTS, DIVISORS)
    check(packet.Tensor, BOOLS, BOOLS[0])
    check(packet.Scalar, INTS, 6)
    check(packet.Scalar_Tensor, 6, INTS)


def test_shifts():
    left, right = aten.bitwise_left_shift, aten.bitwise_right_shift
    check(left.Tensor, INTS, torch.tensor([0, 1, 2, 3]))
    check(right.Tensor, INTS, torch.tensor([0, 1, 2, 40]))
    check(right.Tensor, BYTES, torch.tensor([1, 1, 2, 3, 9], dtype=torch.uint8))
    check(left.Tensor_Scalar, INTS, 2)


@pytest.mark.parametrize("name", ["logical_and", "logical_or", "logical_xor"])
def test_logic_of_any_dtypes(name):
    check(getattr(aten, name).default, INTS, FLOATS)
    check(getattr(aten, name).default, BOOLS, INTS)


@pytest.mark.parametrize("name", ["gcd", "lcm"])
def test_divisors_and_multiples(name):
    check(getattr(aten, name).default, INTS, torch.tensor([6, -4, 0, 10]))


def test_multiply_add():
    for op in (aten.addcmul.default, aten.addcdiv.default):
        check(op, FLOATS, ROW, FLOATS.flip(0))
        check(op, FLOATS, ROW, FLOATS.flip(0), value=-0.3)
        check(op, HALVES, HALVES, HALVES.flip(0), value=0.5, rtol=1e-2)
    check(aten.addcmul.default, INTS, DIVISORS, INTS, value=2)


@pytest.mark.parametrize("weight", [0.0, 0.3, 0.7, 1.0])
def test_lerp(weight):
    check(aten.lerp.Scalar, FLOATS, ROW, weight)
    check(aten.lerp.Tensor, FLOATS, ROW, torch.full_like(ROW, weight))


@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (None, 0.5), (0.5, None), (2.0, -2.0), (0, 1)])
@pytest.mark.parametrize("values", [FLOATS, SPECIAL, INTS], ids=["floats", "special", "ints"])
def test_clamp(values, bounds):
    check(aten.clamp.default, values, *bounds)


def test_clamp_by_tensors():
    check(aten.clamp.Tensor, FLOATS, ROW - 1, ROW)
    check(aten.clamp.Tensor, INTS, None, SCALAR)
    check(aten.clamp_min.default, INTS, 0.5)
    check(aten.clamp_max.Tensor, FLOATS, ROW)


def test_where():
    check(aten.where.self, BOOLS, FLOATS, INTS)
    check(aten.where.self, BOOLS[:, :1], FLOATS, SCALAR)
    check(aten.where.ScalarOther, BOOLS, HALVES, -INF)
    check(aten.where.ScalarSelf, BOOLS, 1.5, INTS)
    check(aten.where.Scalar, BOOLS, 1, 2)


def test_fills():
    check(aten.masked_fill.Scalar, FLOATS, BOOLS, -INF)
    check(aten.masked_fill.Scalar, INTS, BOOLS[0], 7)
    check(aten.masked_fill.Tensor, HALVES, BOOLS, SCALAR)
    check(aten.fill.Scalar, FLOATS, NAN)
    check(aten.fill.Tensor, INTS, INT_SCALAR)


def test_made_of_parts():
    check(aten.complex.default, FLOATS, FLOATS.flip(0))
    check(aten.polar.default, POSITIVE, POSITIVE)
    check(aten.special_zeta.default, POSITIVE + 1.5, POSITIVE, rtol=1e-4)
    check(aten.igamma.default, POSITIVE, POSITIVE.flip(1), rtol=1e-4)
    check(aten.igammac.default, POSITIVE, POSITIVE.flip(1), rtol=1e-4)


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        (aten.add.Tensor, (FLOATS, ROW), {"alpha": 0.1}),
        (aten.mul.Tensor, (HALVES, 0.1), {}),
        (aten.div.Scalar, (INTS, 3.0), {}),
        (aten.addcdiv.default, (FLOATS, FLOATS, ROW), {"value": -0.01}),
        (aten.lerp.Scalar, (FLOATS, ROW, 0.1), {}),
        (aten.where.ScalarOther, (BOOLS, FLOATS, -INF), {}),
        (aten.masked_fill.Scalar, (INTS, BOOLS, 2.0), {}),
        (aten.fill.Scalar, (HALVES, 0.3), {}),
        (aten.gt.Scalar, (FLOATS, 0.9), {}),
        (aten.full.default, ([2, 3], 0.25), {}),
        (aten.scatter.value, (FLOATS, 1, INTS.abs() % 4, 9.0), {}),
    ],
    ids=lambda value: str(value) if isinstance(value, torch._ops.OpOverload) else "",
)
def test_lifted_numbers_are_inputs(op, args, kwargs):
    tensors, numbers = [], []

    def slot(leaf):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            return Slot(len(tensors) - 1)
        if isinstance(leaf, float):
            numbers.append(leaf)
            return Lift(len(numbers) - 1)
        return leaf

    slots = tuple(slot(arg) for arg in args)
    named = {name: slot(value) for name, value in kwargs.items()}
    metas = tuple(Meta.of(t) for t in tensors)
    outs = infer(op, slots, named, metas, numbers)
    call = build_call(op, slots, named, metas, outs=outs)
    with jax.enable_x64(True):
        got = jax.jit(call)([to_array(t) for t in tensors], [np.float64(n) for n in numbers])[0]
    want = op(*args, **kwargs)
    np.testing.assert_allclose(
        got.astype("float32"), want.float(), rtol=1e-2 if got.dtype == "bfloat16" else 1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_false_times_infinity_is_nan(dtype):
    mask = torch.tensor([False, True])
    check(aten._to_copy.default, mask, dtype=dtype)
    for x in (mask, mask.to("jax")):
        assert (x.to(dtype) * float("inf")).isnan().tolist()[0]
        assert (x / 0).isnan().tolist() == [True, False]
        assert (x * torch.tensor([float("nan")] * 2, device=x.device)).isnan().all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_floats_wrap_in_narrow_integers_as_on_the_cpu(dtype):
    check(aten._to_copy.default, torch.tensor([-6.5, -300.0, 300.0, 70000.0]), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_whole_powers_overflow_as_on_the_cpu(dtype):
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    numbers = torch.tensor([0, 1, 2, 3, 63, 64, 65, 100, most // 2 + 1, most, least, least // 2])
    bases, exponents = torch.meshgrid(numbers.to(dtype), numbers.to(dtype), indexing="ij")
    wanted = torch.pow(bases, exponents)
    assert torch.equal(torch.pow(bases.to("jax"), exponents.to("jax")).cpu(), wanted)
    for exponent in (3, 64, 100, 127):
        wanted = torch.pow(numbers.to(dtype), exponent)
        assert torch.equal(torch.pow(numbers.to(dtype).to("jax"), exponent).cpu(), wanted)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16])
def test_floats_that_no_integer_holds_are_as_on_the_cpu(source, dtype):
    x = torch.tensor([INF, -INF, torch.nan, 3e9, -3e9, 300.7, -1.5, 1e19, -1e19, 2.0**31, 2.0**63])
    x = x.to(source)
    assert torch.equal(x.to("jax").to(dtype).cpu(), x.to(dtype))


def test_zeta_and_polygamma_at_their_ends():
    ends = torch.tensor([0.0, -0.0, 1, 2.5, INF, -INF, torch.nan, -2.5, 1e20, 0.5])
    x, q = (t.reshape(-1) for t in torch.meshgrid(ends, ends, indexing="ij"))
    got = torch.special.zeta(x.to("jax"), q.to("jax")).cpu()
    torch.testing.assert_close(got, torch.special.zeta(x, q), equal_nan=True)
    for n in (1, 2, 3):
        got = torch.polygamma(n, ends.to("jax")).cpu()
        torch.testing.assert_close(got, torch.polygamma(n, ends), equal_nan=True)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64, torch.int32])
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float32, torch.bfloat16])
def test_powers_of_two_are_in_their_own_dtype(dtype, kind):
    for x in (torch.tensor(3).to(dtype), torch.tensor([3, 5]).to(dtype)):
        for powers in (torch.tensor(1.5).to(kind), torch.tensor([2.5, 1]).to(kind)):
            got = torch.ldexp(x.to("jax"), powers.to("jax")).cpu()
            if x.shape == powers.shape or x.shape:  # else torch.ldexp of the CPU warns
                wanted = torch.ldexp(x, powers)
                assert got.dtype == wanted.dtype and torch.equal(got, wanted)
