"""Element by element: arithmetic, comparisons, promotion of dtypes, broadcasting."""

from __future__ import annotations

import torch

from tests.fuzz.builder import DTYPES, Builder

from .write import convertible

_UNARY = (
    "abs neg sign floor ceil trunc round square sqrt exp log sin cos tanh sigmoid erf expm1 log1p "
    "atan reciprocal rsqrt frac isnan isinf isfinite logical_not bitwise_not signbit sgn positive "
    "asinh log2 exp2 sinh angle erfc atanh acos cosh tan sinc logit lgamma digamma"
).split()
_ACTIVATIONS = (
    "relu gelu silu elu leaky_relu softplus hardtanh relu6 hardswish hardsigmoid mish selu celu "
    "logsigmoid softsign tanhshrink softshrink hardshrink"
).split()
BINARY = (
    "add sub mul div true_divide floor_divide remainder fmod pow maximum minimum fmax fmin atan2 "
    "eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor "
    "hypot copysign xlogy logaddexp heaviside nextafter isclose float_power ldexp rsub"
).split()
"""Names in torch of functions of two tensors."""
_OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "==", "<", ">=", "&", "|", "^", "@")


def other(b: Builder, x: str) -> str:
    """A second operand: a live tensor that broadcasts with `x`, a new one, or a number."""
    t = b.scope[x]
    kind = b.integer(0, 9)
    if kind < 3:
        return b.number()
    if kind < 7:
        known = b.tensors(lambda o: _together(t, o))
        if known:
            return b.one(known)
    shape = tuple(
        1 if b.chance(15) else n for n in t.shape[b.integer(0, t.dim()) if b.chance(30) else 0 :]
    )
    return b.fresh(shape if not b.chance(3) else (*shape, 7))


def _together(t: torch.Tensor, o: torch.Tensor) -> bool:
    pairs = zip(reversed(t.shape), reversed(o.shape), strict=False)
    return all(n == m or 1 in (n, m) for n, m in pairs)


def _unary(b: Builder) -> None:
    b.bind(f"torch.{b.one(_UNARY)}({b.tensor()})")


def _activation(b: Builder) -> None:
    name = b.one(_ACTIVATIONS)
    finite = name == "gelu"  # the CPU's vectorised kernel gives NaN for infinity

    def fits(t: torch.Tensor) -> bool:
        return t.is_floating_point() and (not finite or bool(t.isfinite().all()))

    b.bind(f"F.{name}({b.tensor(fits)})")


def _binary(b: Builder) -> None:
    x = b.tensor()
    y = other(b, x)
    if b.chance(40):
        b.bind(f"{x} {b.one(_OPERATORS)} {y}" if b.chance(70) else f"{y} {b.one(_OPERATORS)} {x}")
        return
    name = b.one(BINARY)
    if name == "ldexp":  # whose exponents the CPU cuts to 32 bits
        y = f"torch.as_tensor({y}).clamp(-60, 60)"
    extra = (
        f', rounding_mode="{b.one(("floor", "trunc"))}"' if name == "div" and b.chance(40) else ""
    )
    b.bind(f"torch.{name}({x}, {y}{extra})")


def _shift(b: Builder) -> None:
    x = b.tensor(
        lambda t: not t.is_floating_point() and not t.is_complex() and t.dtype != torch.bool
    )
    b.bind(f"{x} {b.one(('<<', '>>'))} {b.integer(0, 3)}")


def _convert(b: Builder) -> None:
    x = b.tensor()
    t = b.scope[x]
    dtype = b.one([dtype for dtype in DTYPES if convertible(t, dtype)])
    b.bind(f"{x}.to({dtype}{', copy=True' if b.chance(20) else ''})")


def _where(b: Builder) -> None:
    x = b.tensor()
    t = b.scope[x]
    mask = b.fresh(t.shape, torch.bool) if b.chance(60) or t.is_complex() else f"{x} > 0"
    first, second = x, other(b, x)
    b.bind(f"torch.where({mask}, {first}, {second})")


def _bounds(b: Builder) -> None:
    x = b.tensor()
    low, high = b.number(), b.number()
    b.bind(b.one((f"{x}.clamp({low}, {high})", f"{x}.clamp(min={low})", f"{x}.clamp(max={high})")))


def _three(b: Builder) -> None:
    x = b.tensor(lambda t: t.is_floating_point() or t.is_complex())
    t = b.scope[x]
    y, z = b.fresh(t.shape, t.dtype), b.fresh(t.shape, t.dtype)
    b.bind(
        b.one(
            (
                f"torch.addcmul({x}, {y}, {z}, value={b.one((1, 0.5, -2))})",
                f"torch.addcdiv({x}, {y}, {z})",
                f"torch.lerp({x}, {y}, {b.one((0.5, 0.25))})",
                f"torch.nan_to_num({x}, 1.0)",
                f"torch.add({x}, {y}, alpha={b.one((2, 0.5, -1))})",
                f"torch.sub({x}, {y}, alpha=3)",
            )
        )
    )


def _make(b: Builder) -> None:
    x = b.tensor()
    b.bind(
        b.one(
            (
                f"torch.zeros_like({x})",
                f"torch.ones_like({x}, dtype={b.one(DTYPES)})",
                f"torch.full_like({x}, {b.integer(0, 3)})",
                f"{x}.new_full((2, 3), {b.integer(0, 3)})",
                f"{x}.clone()",
                f"{x}.contiguous()",
                f"torch.arange({b.integer(-2, 2)}, 8, {b.integer(1, 3)}, device=device)",
                f"torch.arange({b.integer(1, 6)}, device=device, dtype={b.one(DTYPES[:6])})",
                f"torch.linspace({b.integer(-2, 2)}, 3, {b.integer(1, 6)}, device=device)",
                f"torch.full((2, 2), {b.number()}, device=device)",
                f"torch.eye({b.integer(1, 4)}, {b.integer(1, 4)}, device=device)",
                f"torch.tensor([[1, 2.5], [{b.integer(-2, 2)}, 0]], device=device)",
                f"torch.empty_like({x}).fill_({b.integer(0, 2)})",
                f"{x}.new_zeros({b.integer(1, 3)}, 2)",
            )
        )
    )


def _read(b: Builder) -> None:
    """A Python value, now, or `sync`: the tape is executed."""
    if b.chance(20):
        b.add("xs.sync()")
        return
    x = b.tensor(lambda t: t.numel() > 0)
    if not b.chance(30):
        b.bind(f"{x}.{b.one(('shape', 'stride()', 'is_contiguous()', 'numel()', 'dtype'))}")
        return
    exact = b.one(("(x == 0).all().item()", "x.isnan().any().item()", "(x != 0).sum().tolist()"))
    b.bind(exact.replace("x", x, 1))


OPERATIONS = (_binary, _binary, _binary, _unary, _unary, _activation, _convert, _where, _bounds)
OPERATIONS += (_three, _make, _shift, _read)
