"""Functions of two and three operands against CPU torch: promotion, special values, powers."""

import torch

from tests.torch_bridge.lowerings.harness import together
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
HALF = {"rtol": 1e-2}

# Operands that exercise promotion and broadcasting.
_PAIRS = [
    (FLOATS, ROW),
    (INTS, DIVISORS),
    (INTS, ROW),
    (INTS, SCALAR),
    (FLOATS, INT_SCALAR),
    (FLOATS, FLOATS[:, :1]),
    (EMPTY, ROW),
]
_OF_HALVES = [(HALVES, HALVES.flip(0) + 3), (HALVES, SCALAR)]
_NUMBERS = [(FLOATS, 1.5), (INTS, 2), (INTS, 2.5)]
_SPECIAL_PAIR = (SPECIAL[:, None], SPECIAL)


def _near(pair):
    return HALF if pair[0] is HALVES else {}


def test_sums_and_products_by_dtype():
    with together() as check:
        for number, name in enumerate(("add", "sub", "mul", "div")):
            op = getattr(aten, name).Tensor
            for pair in (*_PAIRS, *_OF_HALVES, *_NUMBERS)[number % 2 :: 2]:
                check(op, *pair, **_near(pair))
            check(op, COMPLEX, ROW)
            check(op, COMPLEX, 1.5)
        for name in ("add", "sub", "rsub"):
            check(getattr(aten, name).Tensor, FLOATS, ROW, alpha=2.5)
            check(getattr(aten, name).Tensor, INTS, DIVISORS, alpha=3)
        for op in (aten.add.Tensor, aten.mul.Tensor):
            check(op, BOOLS, BOOLS[0])
            check(op, BOOLS, INTS)
        check(aten.add.Tensor, BYTES, BYTES)  # wraps around
        check(aten.sub.Tensor, BYTES, BYTES.flip(0))


def test_divisions():
    with together() as check:
        pairs = *_PAIRS[:-1], *_OF_HALVES, *_NUMBERS
        for mode, chosen in ((None, pairs[::3]), ("floor", pairs[1::2]), ("trunc", pairs[::2])):
            for pair in chosen:
                check(aten.div.Tensor_mode, *pair, rounding_mode=mode, **_near(pair))
            check(aten.div.Tensor_mode, *_SPECIAL_PAIR, rounding_mode=mode)
        tensors = aten.floor_divide.default, aten.remainder.Tensor, aten.fmod.Tensor
        for number, op in enumerate(tensors):
            for pair in (_PAIRS[1], *_PAIRS[2 * (number % 2) :: 2]):
                check(op, *pair)
        for packet in (aten.floor_divide, aten.remainder, aten.fmod):
            for values, number in ((INTS, -3), (INTS, 2.5), (FLOATS, 2), (FLOATS, -0.7)):
                check(packet.Scalar, values, number)


def test_special_values():
    with together() as check:
        for name in (
            "div.Tensor floor_divide remainder.Tensor fmod.Tensor maximum minimum fmax fmin atan2 "
            "hypot copysign.Tensor pow.Tensor_Tensor logaddexp logaddexp2 xlogy.Tensor "
            "special_xlog1py heaviside nextafter"
        ).split():
            packet, _, overload = name.partition(".")
            check(getattr(getattr(aten, packet), overload or "default"), *_SPECIAL_PAIR)
        for number, name in enumerate(("maximum", "minimum", "fmax", "fmin")):
            for pair in (*_PAIRS, *_OF_HALVES)[number % 2 :: 2]:
                check(getattr(aten, name).default, *pair)


def test_powers():
    values = torch.tensor([0j, complex(-0.0, 0), 1j, 2 + 3j, complex(NAN, 0)])
    base, exponent = torch.tensor([2, -3, 1, -1, -1, 0, 5]), torch.tensor([5, 3, -2, -2, -3, 0, -1])
    with together() as check:
        for number in (0, 1, 2, 3, -1, -2, 0.5, -0.5, 1.5, 2.0):
            negative = type(number) is int and number < 0
            for x in (SPECIAL, FLOATS if negative else INTS):
                check(aten.pow.Tensor_Scalar, x, number)
        for number in (True, False, 2, 2.5):
            check(aten.pow.Tensor_Scalar, BOOLS, number)
        check(aten.pow.Tensor_Scalar, HALVES, 3, rtol=4e-3)  # rounded once
        check(aten.pow.Tensor_Tensor, base, exponent)
        check(aten.pow.Scalar, 3, torch.tensor([0, 1, 4]))
        check(aten.pow.Scalar, 2.5, INTS)
        for number in (1 + 2j, 0.5 + 0j, 0j):
            for x in (values, torch.tensor([0.0, -0.0, -2.0, 3.0, NAN])):
                check(aten.pow.Tensor_Scalar, x, number)
                check(aten.pow.Tensor_Tensor, x, torch.full((5,), number))
                check(aten.pow.Scalar, number, x)
        check(aten.pow.Scalar, 0.0, values)


def test_whole_powers_overflow_as_on_the_cpu():
    with together(rtol=0, atol=0) as check:
        for dtype in (torch.int8, torch.uint8, torch.int64):
            least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
            numbers = [0, 1, 2, 3, 63, 64, 65, 100, most // 2 + 1, most, least, least // 2]
            numbers = torch.tensor(numbers).to(dtype)
            check(aten.pow.Tensor_Tensor, numbers[:, None], numbers)
            for exponent in (3, 64, 100, 127):
                check(aten.pow.Tensor_Scalar, numbers, exponent)


def test_bits_and_three_operands():
    right = aten.bitwise_right_shift
    with together() as check:
        for packet in (aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor):
            check(packet.Tensor, BOOLS, BOOLS[0])
            check(packet.Scalar_Tensor, 6, INTS)
        check(right.Tensor, INTS, torch.tensor([0, 1, 2, 40]))
        check(right.Tensor, BYTES, torch.tensor([1, 1, 2, 3, 9], dtype=torch.uint8))
        for name in ("logical_and", "logical_or", "logical_xor"):
            check(getattr(aten, name).default, INTS, FLOATS)
        for name in ("gcd", "lcm"):
            check(getattr(aten, name).default, INTS, torch.tensor([6, -4, 0, 10]))
        for op in (aten.addcmul.default, aten.addcdiv.default):
            check(op, FLOATS, ROW, FLOATS.flip(0), value=-0.3)
            check(op, HALVES, HALVES, HALVES.flip(0), value=0.5, **HALF)
        check(aten.addcmul.default, INTS, DIVISORS, INTS, value=2)
        for weight in (0.0, 0.3, 0.7, 1.0):
            check(aten.lerp.Scalar, FLOATS, ROW, weight)
        for bounds in ((-1.0, 1.0), (None, 0.5), (0.5, None), (2.0, -2.0), (0, 1)):
            for values in (SPECIAL, INTS):
                check(aten.clamp.default, values, *bounds)
        check(aten.clamp.Tensor, INTS, None, SCALAR)
        check(aten.clamp_min.default, INTS, 0.5)
        check(aten.where.self, BOOLS[:, :1], FLOATS, INTS)
        check(aten.where.ScalarOther, BOOLS, HALVES, -INF)
        check(aten.where.ScalarSelf, BOOLS, 1.5, INTS)
        check(aten.where.Scalar, BOOLS, 1, 2)
        check(aten.masked_fill.Tensor, HALVES, BOOLS, SCALAR)
        check(aten.fill.Tensor, INTS, INT_SCALAR)
        check(aten.polar.default, POSITIVE, POSITIVE)


def test_numbers_as_inputs_of_the_program_give_what_constants_give():
    with together(lifted=True) as check:
        check(aten.add.Tensor, FLOATS, ROW, alpha=0.1)
        check(aten.mul.Tensor, HALVES, 0.1, **HALF)
        check(aten.div.Scalar, INTS, 3.0)
        check(aten.addcdiv.default, FLOATS, FLOATS, ROW, value=-0.01)
        check(aten.lerp.Scalar, FLOATS, ROW, 0.1)
        check(aten.where.ScalarOther, BOOLS, FLOATS, -INF)
        check(aten.masked_fill.Scalar, INTS, BOOLS, 2.0)
        check(aten.fill.Scalar, HALVES, 0.3, **HALF)
        check(aten.gt.Scalar, FLOATS, 0.9)
        check(aten.full.default, [2, 3], 0.25)
        check(aten.scatter.value, FLOATS, 1, INTS.abs() % 4, 9.0)


def test_floats_that_no_integer_holds_are_as_on_the_cpu():
    x = torch.tensor([INF, -INF, NAN, 3e9, -3e9, 300.7, -1.5, 1e19, -1e19, 2.0**31, 2.0**63])
    narrow = torch.tensor([-6.5, -300.0, 300.0, 70000.0])  # these wrap around
    with together(rtol=0, atol=0) as check:
        for source in (torch.float32, torch.float64, torch.bfloat16):
            for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
                check(aten._to_copy.default, x.to(source), dtype=dtype)
        for dtype in (torch.uint8, torch.int8, torch.int16):
            check(aten._to_copy.default, narrow, dtype=dtype)
    assert torch.equal(x.to("jax").to(torch.int32).cpu(), x.to(torch.int32))


def test_powers_of_two_are_in_their_own_dtype():
    pairs = []
    for dtype in (torch.int32, torch.bool, torch.float32, torch.bfloat16):
        x, number = torch.tensor([3, 5]).to(dtype), torch.tensor(3).to(dtype)
        for kind in (torch.bfloat16, torch.float64, torch.int32):
            powers, power = torch.tensor([2.5, 1]).to(kind), torch.tensor(1.5).to(kind)
            # torch.ldexp of the CPU warns of a number by several.
            for pair in ((x, powers), (x, power), (number, power)):
                there = (t.to("jax") for t in pair)
                pairs.append((torch.ldexp(*there), torch.ldexp(*pair)))
            assert torch.ldexp(number.to("jax"), powers.to("jax")).shape == (2,)
    for got, want in pairs:
        assert got.dtype == want.dtype and torch.equal(got.cpu(), want)
