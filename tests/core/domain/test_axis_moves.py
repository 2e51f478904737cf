"""Rows of an axis in blocks going into other blocks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import isoshard as iso
from isoshard import P
from isoshard.core.domain.blocks.axis_moves import at_home, in_chunks, movable, move_axis
from isoshard.core.domain.blocks.splits import AxisSplit

from .blocks import in_blocks, out_of_blocks
from .traffic import compiled, gathered

SPLITS = {4: [(5, 2, 7, 4), (0, 3, 9, 6), (5, 5, 5, 3)], 8: [(3, 2, 0, 4, 2, 1, 5, 1)]}
X = np.random.default_rng(0).normal(size=(18, 3)).astype(np.float32)


def split_of(sizes, mesh):
    return AxisSplit(sizes, max(sizes), ("x",), mesh)


@pytest.mark.parametrize(
    ("shift", "count", "reverse"), [(0, 18, False), (-3, 11, False), (2, 25, False), (0, 18, True)]
)
@pytest.mark.parametrize("devices", [4, 8])
def test_rows_go_where_they_belong(devices, shift, count, reverse):
    mesh = iso.make_mesh((devices,), ("x",), axis_types=AxisType.Auto)  # as inside a verb
    want = np.zeros((count, 3))
    rows = np.arange(count) - shift
    real = (rows >= 0) & (rows < 18)
    want[real] = (X[::-1] if reverse else X)[rows[real]]
    for sizes in SPLITS[devices]:
        before = split_of(sizes, mesh)
        after = before if reverse else at_home(split_of(SPLITS[devices][-1], mesh), shift, count)
        u = in_blocks(X, mesh, P("x"), (sizes, None))

        def move(x, before=before, after=after):
            return move_axis(x, 0, before, after, shift, reverse=reverse)

        found = iso.UnevenArray(jax.jit(move)(u.array), (count, 3), (after.sizes, None))
        np.testing.assert_array_equal(out_of_blocks(found), want)
        assert not np.asarray(found.array)[~np.asarray(found.mask())].any()
        gradient = jax.grad(lambda x, move=move: (move(x) * jnp.cos(move(x))).sum())
        assert gathered(compiled(gradient, u.array)) == 0
        took = np.zeros(18, bool)
        took[rows[real]] = True
        slopes = jax.jit(gradient)(jnp.nan_to_num(u.array))
        slopes = out_of_blocks(iso.UnevenArray(slopes, (18, 3), (sizes, None)))
        X64 = X.astype(np.float64)
        kept = (took[::-1] if reverse else took)[:, None]
        np.testing.assert_allclose(slopes, kept * (np.cos(X64) - X64 * np.sin(X64)), atol=1e-6)


def test_only_over_the_same_devices():
    mesh = iso.make_mesh((4,), ("x",))
    split = split_of((5, 2, 7, 4), mesh)
    assert movable(split, split_of((0, 3, 9, 6), mesh))
    assert not movable(split, None)
    assert not movable(dataclasses.replace(split, names=()), split)
    assert not movable(split, split_of((9, 9), iso.make_mesh((2, 4), ("x", "y"))))


def test_where_rows_stay():
    split = AxisSplit((5, 2, 7, 4), 7)
    assert at_home(split, 2, 25).sizes == (7, 2, 7, 9)
    assert at_home(split, -6, 3).sizes == (0, 1, 2, 0)
    assert in_chunks(split, 9).sizes == (3, 3, 3, 0)


def test_repacking_gathers_nothing():
    mesh = iso.make_mesh((4,), ("x",))
    u = in_blocks(X, mesh, P("x"), ((5, 2, 7, 4), None))
    found = iso.domain.repack(u, {0: (0, 3, 9, 6)})
    assert found.sizes[0] == (0, 3, 9, 6)
    np.testing.assert_array_equal(out_of_blocks(found), X)
    text = compiled(lambda u: iso.domain.repack(u, {0: (0, 3, 9, 6)}), u)
    assert gathered(text) == 0 and "collective-permute" in text
