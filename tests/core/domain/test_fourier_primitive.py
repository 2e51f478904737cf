"""Fourier transforms of arrays in blocks: along whole axes nothing is sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import isoshard as iso
from isoshard import P
from isoshard.core.domain.lifting.lifting import lift

from .blocks import in_blocks, out_of_blocks

ROWS, COLUMNS = (5, 2, 7, 4), (3, 5)
SPLITS = {
    "rows": (P("y"), (ROWS, None, None)),
    "rows and columns": (P("y", "x"), (ROWS, COLUMNS, None)),
    "what is transformed": (P(None, "x", "y"), (None, COLUMNS, (2, 0, 1, 3))),
}


@pytest.mark.parametrize("split", SPLITS)
def test_transforms_are_those_of_one_device(split, mesh):
    spec, sizes = SPLITS[split]
    x = np.random.default_rng(0).normal(size=(18, 8, 6))
    u = in_blocks(x.astype(np.float32), mesh, spec, sizes)
    found = lift(jnp.fft.fft)(u)
    assert found.sizes == sizes
    np.testing.assert_allclose(out_of_blocks(found), np.fft.fft(x), rtol=1e-5, atol=1e-5)
    half = lift(jnp.fft.rfft)(u)
    np.testing.assert_allclose(out_of_blocks(half), np.fft.rfft(x), rtol=1e-5, atol=1e-5)
    # sum |fft(x)|^2 = 6 sum x^2 for lines of 6
    with jax.set_mesh(mesh):
        gradient = jax.grad(lambda u: lift(lambda a: (jnp.abs(jnp.fft.fft(a)) ** 2).sum())(u))(u)
    np.testing.assert_allclose(out_of_blocks(gradient), 12 * x, rtol=1e-4, atol=1e-4)


def test_nothing_is_sent_beside_what_is_split(mesh):
    spec, sizes = SPLITS["rows and columns"]
    u = in_blocks(np.ones((18, 8, 6), np.float32), mesh, spec, sizes)

    def back(u, dout):
        out, pull = jax.vjp(lift(lambda a: jnp.fft.rfft(a)), u)
        return out, pull(dout)

    dout = lift(jnp.fft.rfft)(u)
    text = jax.jit(back).lower(u, iso.UnevenArray(dout.array, dout.shape, dout.sizes)).compile()
    for collective in ("all-gather", "all-reduce", "collective-permute", "all-to-all"):
        assert f" {collective}(" not in text.as_text()
