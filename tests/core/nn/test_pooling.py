"""Maxima, sums and means of windows against torch's in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from isoshard.core.nn.pooling import (
    adaptive_windows,
    argmax,
    lowest,
    window_argmax,
    window_max,
    window_sum,
)
from isoshard.core.nn.window_grid import WindowGrid

X = np.random.default_rng(0).integers(-3, 4, (2, 2, 7, 8)).astype(np.float64)
GRIDS = {
    "plain": ((3, 2), (3, 2), (1, 1), (0, 0), False),
    "padded": ((3, 2), (2, 1), (1, 1), (1, 1), False),
    "hanging": ((3, 4), (2, 3), (1, 1), (1, 2), True),
    "dilated": ((3, 2), (1, 2), (2, 3), (1, 0), False),
}


def grid_of(name):
    kernel, stride, dilation, padding, ceil = GRIDS[name]
    return WindowGrid((7, 8), kernel, stride, dilation, tuple((p, p) for p in padding), ceil)


@pytest.mark.parametrize(("name", "nan"), [(name, bool(n % 2)) for n, name in enumerate(GRIDS)])
def test_maxima_and_their_places(name, nan, x64):
    kernel, stride, dilation, padding, ceil = GRIDS[name]
    x, grid = X.copy(), grid_of(name)
    if nan:
        x[:, :, 2, 3] = x[:, :, 2, 5] = np.nan
    options = {"dilation": dilation, "ceil_mode": ceil, "return_indices": True}
    values, places = F.max_pool2d(torch.from_numpy(x), kernel, stride, padding, **options)
    position = jnp.broadcast_to(jnp.arange(56, dtype=jnp.int32).reshape(7, 8), x.shape)
    assert values.shape[2:] == grid.counts
    np.testing.assert_array_equal(window_max(jnp.asarray(x), grid), values)
    np.testing.assert_array_equal(window_argmax(jnp.asarray(x), position, grid), places)


@pytest.mark.parametrize(
    ("name", "include_pad"), [("padded", True), ("padded", False), ("hanging", False)]
)
def test_means(name, include_pad, x64):
    kernel, stride, _, padding, ceil = GRIDS[name]
    want = F.avg_pool2d(torch.from_numpy(X), kernel, stride, padding, ceil, include_pad)
    grid = grid_of(name)
    got = window_sum(jnp.asarray(X), grid) / grid.lengths(include_pad=include_pad)
    np.testing.assert_allclose(got, want, rtol=1e-14)


def test_windows_of_adaptive_pooling():
    for size in range(1, 9):
        for count in range(1, 9):
            places, inside = adaptive_windows(np.arange(count), size, count)
            x = np.random.default_rng(0).normal(size=size)
            want = F.adaptive_avg_pool1d(torch.from_numpy(x)[None], count)[0]
            np.testing.assert_allclose((x[places] * inside).sum(1) / inside.sum(1), want)
            assert {*places[inside].tolist()} == {*range(size)}
            some = adaptive_windows(np.arange(count)[count // 2 :], size, count)
            assert (some[1].sum(1) == inside.sum(1)[count // 2 :]).all()


def test_the_first_largest_element_or_the_last_nan():
    rows = jnp.array([[1.0, 3, 3, 2], [jnp.nan, 1, jnp.nan, 5], [-jnp.inf] * 4])
    assert argmax(rows).tolist() == [[1], [2], [0]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "uint8", "int32"])
def test_a_maximum_begins_with_the_least_value(dtype):
    least = lowest(jnp.dtype(dtype))
    assert least.dtype == dtype
    assert least.item() == {"int8": -128, "uint8": 0, "int32": -(2**31)}.get(dtype, -np.inf)
