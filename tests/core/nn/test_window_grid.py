"""How many windows there are, and what they read, by counting."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from isoshard.core.nn.window_grid import (
    WindowGrid,
    elements_between,
    window_count,
    window_elements,
)

NUMBERS = [*itertools.product(range(4, 10), (1, 2, 3), (1, 2, 4), (1, 2), (0, 1), (False, True))]


@pytest.mark.filterwarnings("ignore")
def test_there_are_as_many_windows_as_torch_has():
    for size, kernel, stride, dilation, pad, ceil in NUMBERS:
        if 2 * pad > kernel or size + 2 * pad < (kernel - 1) * dilation + 1:
            continue
        made = F.max_pool1d(torch.ones(1, 1, size), kernel, stride, pad, dilation, ceil)
        count = window_count(size, kernel, stride, dilation, (pad, pad), ceil)
        assert (count, type(count)) == (made.shape[-1], int)


@pytest.mark.parametrize("pad", [(0, 0), (2, 1), (0, 3), (-1, 0), (1, -2)])
def test_every_window_is_whole_within_the_edges(pad):
    for size, kernel, stride, dilation, _, ceil in NUMBERS:
        grid = WindowGrid((size,), (kernel,), (stride,), (dilation,), (pad,), ceil)
        if grid.counts[0] < 1:
            continue
        ((before, after),) = grid.edges
        room = size + before + after - (kernel - 1) * dilation - 1
        assert room // stride + 1 == grid.counts[0]


def test_elements_that_count_are_counted():
    for kernel, dilation, low, high in itertools.product((1, 3), (1, 2, 3), (-2, 0), (4, 7)):
        first = np.arange(-2, 9)
        taps = first[:, None] + np.arange(kernel) * dilation
        wanted = ((taps >= low) & (taps < high)).sum(1)
        assert (elements_between(first, kernel, dilation, low, high) == wanted).all()


def test_lengths_are_a_product_of_those_along_each_axis():
    grid = WindowGrid((5, 4), (3, 2), (2, 2), (1, 1), ((1, 1), (0, 0)))
    assert grid.lengths(include_pad=True).tolist() == [[6, 6]] * 3
    assert grid.lengths(include_pad=False).tolist() == [[4, 4], [6, 6], [4, 4]]


def test_elements_of_windows_are_those_that_numpy_slices():
    x = np.arange(2 * 7 * 8).reshape(2, 7, 8)
    got = [*window_elements(jnp.asarray(x), (2, 3), (2, 1), (3, 2), (2, 4))]
    places = itertools.product(range(2), range(3))
    for found, (row, column) in zip(got, places, strict=True):
        np.testing.assert_array_equal(
            found, x[:, 3 * row : 3 * row + 3 : 2, 2 * column : 2 * column + 4]
        )
