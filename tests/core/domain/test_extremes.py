"""Largest and smallest elements over blocks: NaN is kept, in every dtype, and padding is none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import isoshard as iso
from isoshard import P
from isoshard.core.domain.blocks.extremes import keeping_nan

SIZES = ((2, 0, 3, 1),)
REDUCE = {"max": jnp.max, "min": jnp.min}


@pytest.fixture
def line():
    return iso.make_mesh((4,), ("x",))


def laid(x, line):
    return iso.shard(jnp.asarray(x), line, P("x"), uneven="pad", sizes=SIZES)


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("name", REDUCE)
def test_one_nan_is_kept(name, place, line):
    x = np.arange(6, dtype=np.float32)
    x[place] = np.nan
    assert np.isnan(iso.domain.lift(REDUCE[name])(laid(x, line)))


DTYPES = ["bfloat16", "float16", "float8_e4m3fn", "int8", "uint32", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", REDUCE)
def test_every_dtype(name, dtype, line):
    x = jnp.array([1, 5, 3, 2, 5, 1]).astype(dtype)
    found = iso.domain.lift(REDUCE[name])(laid(x, line))
    assert found.dtype == x.dtype and found == REDUCE[name](x)


@pytest.mark.parametrize("name", REDUCE)
def test_complex_numbers(name, line):
    """By their real parts, as JAX has it; the axis is gathered."""
    x = jnp.array([1 + 2j, 3j, -4, 2, 2 + 1j, 0])
    assert iso.domain.lift(REDUCE[name])(laid(x, line)) == REDUCE[name](x)


NUMBERS = np.array([-np.inf, -3.5, -1e-40, -0.0, 0.0, 1e-40, 2.0, 3e38, np.inf], np.float32)


@pytest.mark.parametrize("name", REDUCE)
def test_the_order_of_floats(name):
    """Of every two numbers, also subnormal and infinite ones."""
    pairs = np.stack(np.meshgrid(NUMBERS, NUMBERS), -1).reshape(-1, 2)
    found = keeping_nan(lambda x: REDUCE[name](x, -1), jnp.asarray(pairs), least=name == "min")
    np.testing.assert_array_equal(found, getattr(np, name)(pairs, -1))
    with_nan = pairs.copy()
    with_nan[:, 1] = np.nan
    found = keeping_nan(lambda x: REDUCE[name](x, -1), jnp.asarray(with_nan), least=name == "min")
    assert np.isnan(found).all()


def test_equal_ones_share_the_gradient(line):
    x = np.array([2.0, 5.0, 5.0, 1.0, 0.0, 5.0], np.float32)
    found = jax.jit(jax.grad(iso.domain.lift(jnp.max)))(laid(x, line))
    np.testing.assert_allclose(np.asarray(iso.full(found)), (x == 5) / 3, rtol=1e-6)


@pytest.mark.parametrize("op", ["max", "min"])
def test_handlers_keep_it_too(op, line):
    def handler(shards, x):
        return shards.all_reduce(x, "x", op), P()

    routed = iso.domain.register_function_handler(lambda x: REDUCE[op](x.reshape(4, 2), 0), handler)
    x = np.array([1, np.nan, 2, 3, 4, 5, 6, 7], np.float32)
    found = routed(iso.shard(x, line, P("x")))
    assert np.isnan(found[1]) and found[0] == REDUCE[op](x[::2])
