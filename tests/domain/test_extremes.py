"""Largest and smallest elements over blocks: NaN is kept, in every dtype, and padding is none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import isoshard as iso
from isoshard import P
from isoshard.core.blocks.extremes import keeping_nan

from .blocks import in_blocks, out_of_blocks

SIZES = ((2, 0, 3, 1),)
REDUCE = {"max": jnp.max, "min": jnp.min}
DTYPES = ["bfloat16", "float16", "float8_e4m3fn", "int8", "uint32", "bool", "complex64"]


def on_line(x, padding=np.nan):
    return in_blocks(x, iso.make_mesh((4,), ("x",)), P("x"), SIZES, padding)


def test_every_dtype_and_one_nan_at_any_place():
    """Complex numbers by their real parts, as JAX has it."""
    numbers = np.array([1, 5, 3, 2, 5, 1])
    x = {dtype: numbers.astype(jnp.dtype(dtype)) for dtype in DTYPES}
    x["complex64"] += np.array([2j, 0, 1j, 0, -1j, 0], np.complex64)
    holes = {
        str(place): np.where(np.arange(6) == place, np.nan, np.arange(6)).astype(np.float32)
        for place in range(6)
    }

    def run(given):
        return {name: jax.tree.map(reduce, given[name]) for name, reduce in REDUCE.items()}

    laid = {
        name: {key: on_line(one, padding) for key, one in (x | holes).items()}
        for name, padding in (("max", 9), ("min", 0))
    }
    found = jax.jit(iso.domain.lift(run))(laid)
    right = jax.jit(run)(dict.fromkeys(REDUCE, x))
    for name, wanted in right.items():
        for dtype, one in wanted.items():
            assert found[name][dtype].dtype == one.dtype, (name, dtype)
            assert found[name][dtype] == one, (name, dtype)
        assert np.isnan([found[name][place] for place in holes]).all(), name


NUMBERS = np.array([-np.inf, -3.5, -1e-40, -0.0, 0.0, 1e-40, 2.0, 3e38, np.inf], np.float32)


def test_the_order_of_floats():
    """Of every two numbers, also subnormal and infinite ones."""
    pairs = np.stack(np.meshgrid(NUMBERS, NUMBERS), -1).reshape(-1, 2)
    with_nan = pairs.copy()
    with_nan[:, 1] = np.nan

    @jax.jit
    def both(x):
        return {
            name: keeping_nan(lambda x, reduce=reduce: reduce(x, -1), x, least=name == "min")
            for name, reduce in REDUCE.items()
        }

    for name, found in both(pairs).items():
        np.testing.assert_array_equal(found, getattr(np, name)(pairs, -1))
    assert all(np.isnan(found).all() for found in both(with_nan).values())


def test_equal_ones_share_the_gradient():
    x = np.array([2.0, 5.0, 5.0, 1.0, 0.0, 5.0], np.float32)
    found = jax.jit(jax.grad(iso.domain.lift(jnp.max)))(on_line(x))
    np.testing.assert_allclose(out_of_blocks(found), (x == 5) / 3, rtol=1e-6)


@pytest.mark.parametrize("op", ["max", "min"])
def test_handlers_keep_it_too(op):
    def handler(shards, x):
        return shards.all_reduce(x, "x", op), P()

    routed = iso.domain.register_function_handler(lambda x: REDUCE[op](x.reshape(4, 2), 0), handler)
    x = np.array([1, np.nan, 2, 3, 4, 5, 6, 7], np.float32)
    found = routed(iso.shard(x, iso.make_mesh((4,), ("x",)), P("x")))
    assert np.isnan(found[1]) and found[0] == getattr(np, op)(x[::2])
