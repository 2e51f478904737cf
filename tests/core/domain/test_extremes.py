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
DTYPES = ["bfloat16", "float16", "float8_e4m3fn", "int8", "uint32", "bool", "complex64"]


@pytest.fixture
def line():
    return iso.make_mesh((4,), ("x",))


def laid(x, line):
    return iso.shard(jnp.asarray(x), line, P("x"), uneven="pad", sizes=SIZES)


@pytest.mark.parametrize("name", REDUCE)
def test_every_dtype_and_one_nan_at_any_place(name, line):
    """Complex numbers by their real parts, as JAX has it."""
    numbers = jnp.array([1, 5, 3, 2, 5, 1])
    x = {dtype: numbers.astype(dtype) for dtype in DTYPES}
    x["complex64"] += jnp.array([2j, 0, 1j, 0, -1j, 0])
    holes = {place: np.where(np.arange(6) == place, np.nan, np.arange(6.0)) for place in range(6)}
    given = jax.tree.map(lambda x: laid(x, line), (x, holes))
    found, kept = jax.jit(iso.domain.lift(lambda *trees: jax.tree.map(REDUCE[name], trees)))(*given)
    for dtype, one in found.items():
        assert one.dtype == x[dtype].dtype and one == REDUCE[name](x[dtype])
    assert np.isnan([*kept.values()]).all()


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
