"""Inside lifted functions: what reads neighbours does so by halos, and gathers no axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax
from torch.nn import functional as F

import isoshard as iso
from isoshard import P

from .blocks import dense, in_blocks, out_of_blocks, with_loss
from .traffic import compiled, gathered, summed

KERNEL = np.random.default_rng(1).normal(size=(6, 4, 3, 3))
LAST = ("NHWC", "HWIO", "NHWC")


def conv(x, kernel, strides=(1, 1), padding=((1, 1), (1, 1)), **options):
    return lax.conv_general_dilated(x, kernel.astype(x.dtype), strides, padding, **options)


def windows(start, join, x):
    pads = ((0, 0), (0, 0), (1, 1), (0, 0))
    return lax.reduce_window(x, start, join, (1, 1, 3, 2), (1, 1, 2, 1), pads)


def put(x, y, begin):
    start = (0, 0, begin, 0)
    return lax.dynamic_update_slice(x, y, start)


LOCAL = {
    "conv": lambda x, k: conv(x, k),
    "conv, channels last": lambda x, k: conv(
        x.transpose(0, 2, 3, 1), k.transpose(2, 3, 1, 0), dimension_numbers=LAST
    ),
    "sums of windows": lambda x, k: windows(0.0, lax.add, x),
    "pad, traced value": lambda x, k: lax.pad(x, k.sum(), ((0, 0, 0),) * 2 + ((2, 3, 0),) * 2),
    "pad, wrapped": lambda x, k: jnp.pad(x, ((0, 0), (0, 0), (2, 5), (1, 0)), mode="wrap"),
    "roll": lambda x, k: jnp.roll(x, (5, 1), (2, 3)),
    "flip": lambda x, k: x[:, :, ::-1, ::-1],
    "two parts": lambda x, k: [jnp.sin(part) for part in jnp.split(x, [7], 2)],
    "put together": lambda x, k: jnp.concatenate([x[:, :, :4], x, x[:, :, 17:]], 2),
    "written into": lambda x, k: put(x, 2 * x[:, :, 4:13], 6),
    "written into zeros": lambda x, k: put(jnp.zeros((2, 4, 25, 6), x.dtype), x, 3),
}
TOTALS = {  # one number of each device, for each row of the other axes
    "cumprod": lambda x, k: jnp.cumprod(x, 2),
    "cummax": lambda x, k: lax.cummax(x, 2, reverse=True),
}
LAYOUTS = {
    "given": ((4,), ("x",), P(None, None, "x"), (5, 2, 7, 4)),
    "empty": ((4,), ("x",), P(None, None, "x"), (0, 3, 9, 6)),
    "chunk of 8": ((8,), ("x",), P(None, None, "x"), (3, 3, 3, 3, 3, 3, 0, 0)),
}
X = np.random.default_rng(0).normal(size=(2, 4, 18, 6)).astype(np.float32)


def check(function, wanted, layout, most):
    """Results and gradients as in float64; the largest gathered array has `most` elements."""
    shape, names, spec, sizes = LAYOUTS[layout]
    mesh = iso.make_mesh(shape, names)
    u = in_blocks(X, mesh, spec, (None, None, sizes, None))
    kernel = KERNEL.astype(np.float32)
    lifted = jax.value_and_grad(iso.domain.lift(with_loss(function)), (0, 1), has_aux=True)
    program = jax.jit(lifted).lower(u, kernel).compile()
    (_, results), gradients = program(u, kernel)
    want, want_gradients = wanted()
    assert gradients[0].sizes == u.sizes
    found = jax.tree.leaves((results, gradients), is_leaf=lambda x: isinstance(x, iso.UnevenArray))
    for one, other in zip(found, jax.tree.leaves((want, want_gradients)), strict=True):
        np.testing.assert_allclose(out_of_blocks(one), other, rtol=1e-4, atol=3e-4)
    if most is not None:
        assert gathered(program.as_text()) <= most


@pytest.mark.parametrize(
    ("layout", "functions", "most"),
    [("given", LOCAL, 0), ("empty", TOTALS, 2 * 4 * 4 * 6)],
    ids=["halos", "totals"],
)
def test_by_halos_and_totals(layout, functions, most):
    def run(x, k):
        return {name: function(x, k) for name, function in functions.items()}

    check(run, lambda: dense(run, X, KERNEL), layout, most)


def test_a_gradient_inside_is_that_of_the_operator():
    mesh = iso.make_mesh((4,), ("x",))
    u = in_blocks(X, mesh, P(None, None, "x"), (None, None, (5, 2, 7, 4), None))

    def loss(x):
        out = iso.domain.conv(x, KERNEL.astype(x.dtype), padding=1)
        return (out * jnp.cos(out)).sum()

    lifted = iso.domain.lift(jax.grad(loss))
    found = jax.jit(lifted)(u)
    wide = torch.tensor(X.astype(np.float64), requires_grad=True)
    out = F.conv2d(wide, torch.tensor(KERNEL), padding=1)
    (out * out.cos()).sum().backward()
    assert found.sizes == u.sizes and gathered(compiled(lifted, u)) == 0
    np.testing.assert_allclose(out_of_blocks(found), wide.grad, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: jnp.concatenate([a, 2 * b], 1),
        lambda a, b: jnp.concatenate([b, a, b], 1),
        lambda a, b: lax.dynamic_update_slice(jnp.pad(a, ((0, 0), (0, 4))), b, (0, 2)),
    ],
)
def test_operands_that_the_same_mesh_axes_split_along_other_axes(function):
    mesh = iso.make_mesh((2, 4), ("x", "y"))
    a, b = (np.random.default_rng(n).normal(size=(4, 3)).astype(np.float32) for n in (1, 2))
    laid = (
        in_blocks(a, mesh, P("x", "y"), ((3, 1), (1, 0, 1, 1))),
        in_blocks(b, mesh, P("y", "x"), ((1, 0, 1, 2), (1, 2))),
    )
    found = iso.domain.lift(function)(*laid)
    np.testing.assert_allclose(out_of_blocks(found), function(a, b), rtol=1e-6)


BITS = {
    "sign": lambda x: jnp.signbit(-x),
    "copied sign": lambda x: jnp.copysign(jnp.float32(2), -x),
    "wider": lambda x: lax.bitcast_convert_type(x, jnp.uint8),
    "narrower": lambda x: lax.bitcast_convert_type(
        lax.bitcast_convert_type(x, jnp.uint16) + jnp.uint16(1), jnp.float32
    ),
}


def test_bits_of_zeros():
    numbers = np.array([[0.0, -0.0, 1.0, -2.0, 0.0]], np.float32).repeat(2, 0)
    u = in_blocks(numbers, iso.make_mesh((2, 4), ("x", "y")), P("x", "y"), (None, (2, 1, 0, 2)))
    lifted = iso.domain.lift(lambda x: {name: function(x) for name, function in BITS.items()})
    for name, one in lifted(u).items():
        found, want = out_of_blocks(one), np.asarray(BITS[name](numbers))
        assert found.dtype == want.dtype
        np.testing.assert_array_equal(found.view(np.uint8), want.view(np.uint8))
    text = compiled(iso.domain.lift(lambda x: [BITS["sign"](x), BITS["copied sign"](x)]), u)
    assert gathered(text) == summed(text) == 0
