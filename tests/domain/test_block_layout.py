"""Layouts in blocks: as keys, as constraints in lifted functions, and on concrete arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import isoshard as iso
from isoshard import P, UnevenArray
from isoshard.core.blocks.block_layout import (
    BlockLayout,
    lay_in_blocks,
    lay_out_in_blocks,
    without_padding,
)
from isoshard.core.errors import ShardingError
from isoshard.core.layout.axis_types import auto
from isoshard.core.lifting.lifting import lift

SIZES = (5, 2, 7, 4)


@pytest.fixture
def mesh():
    return iso.make_mesh((2, 4), ("data", "x"))


@pytest.fixture
def rows():
    return np.random.default_rng(0).normal(size=(18, 6)).astype(np.float32)


@pytest.fixture
def layout(mesh):
    return BlockLayout.plan((18, 6), mesh, P("x"), (SIZES, None))


def test_equal_layouts_are_one_key(mesh, rows, layout):
    u = iso.shard(rows, mesh, P("x"), uneven="pad", sizes=(SIZES, None))
    assert BlockLayout.of(u) == layout
    assert len({BlockLayout.of(u), layout, BlockLayout.of(jax.tree.map(jnp.sin, u))}) == 1
    assert layout.block == (7, 6)
    assert layout.padded == (28, 6)
    assert not layout.is_even
    assert [split and split.sizes for split in layout.splits] == [SIZES, None]


def test_resharded_keeps_sizes_where_there_are_as_many_blocks(mesh, layout):
    assert layout.resharded(P("x", "data")).sizes == (SIZES, None)
    assert layout.resharded(P(None, "x")).sizes == (None, (2, 2, 2, 0))
    assert isinstance(layout.resharded(P("data")), NamedSharding)
    assert isinstance(BlockLayout.plan((16, 6), mesh, P("x")), NamedSharding)  # it divides
    with pytest.raises(ShardingError, match="has no known mesh"):
        BlockLayout.of(UnevenArray(jnp.zeros(4), (3,), ((1, 2),)))


def test_arrays_are_laid_out(mesh, rows, layout):
    other = iso.shard(rows, mesh, P("x"), uneven="pad")
    for given in (rows, jnp.asarray(rows), iso.shard(rows, mesh, P("data")), other):
        u = lay_out_in_blocks(given, layout)
        assert BlockLayout.of(u) == layout
        np.testing.assert_array_equal(without_padding(u), rows)
        for source in (u, given):
            back = lay_out_in_blocks(source, NamedSharding(mesh, P("data")))
            assert isinstance(back, jax.Array)
            np.testing.assert_array_equal(back, rows)
    with pytest.raises(ShardingError, match=r"shape \(17, 6\) cannot be in the blocks of shape"):
        lay_out_in_blocks(jnp.asarray(rows)[:-1], layout)


@pytest.mark.parametrize("blocks", [False, True])
def test_64_bits_become_32_and_are_counted(mesh, rows, layout, blocks):
    wanted = layout if blocks else NamedSharding(mesh, P("data"))
    before = iso.metrics.counters().get("narrowed", 0)
    laid = lay_out_in_blocks(rows.astype(np.float64), wanted)
    assert laid.dtype == np.float32 and iso.metrics.counters()["narrowed"] == before + 1
    with pytest.raises(iso.errors.CopyError, match=r"int64"):
        lay_out_in_blocks(np.full(rows.shape, 2**40), wanted)


def test_constraints_inside_a_lifted_function(mesh, rows, layout):
    mesh = auto(mesh)  # along Explicit axes such a constraint is a check
    u = lay_out_in_blocks(rows, layout)
    other = BlockLayout.plan((18, 6), mesh, P("x"), ((0, 3, 9, 6), None))

    def f(x):
        inner = lay_in_blocks(x * 2, other)
        whole = jax.lax.with_sharding_constraint(x + 1, NamedSharding(mesh, P()))
        some = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(P.UNCONSTRAINED, None)))
        return inner, whole, some

    inner, whole, some = lift(f)(u)
    assert inner.sizes == other.sizes
    assert some.sizes == layout.sizes
    assert isinstance(whole, jax.Array)
    np.testing.assert_array_equal(without_padding(inner), rows * 2)
    np.testing.assert_array_equal(whole, rows + 1)


def test_elsewhere_it_asks_for_nothing(rows, layout):
    x = jnp.asarray(rows)
    for run in (lay_in_blocks, jax.jit(lay_in_blocks, static_argnums=1)):
        np.testing.assert_array_equal(run(x, layout), rows)
    (pulled,) = jax.vjp(lambda x: lay_in_blocks(x, layout), x)[1](x)
    np.testing.assert_array_equal(pulled, rows)
    with pytest.raises(ShardingError, match=r"\(17, 6\) cannot be in the blocks"):
        lay_in_blocks(x[:17], layout)
