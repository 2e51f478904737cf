"""Interpolation against torch's in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from isoshard.core.nn.resizing import (
    Taps,
    cubic,
    filter_taps,
    matrix_of,
    resample,
    smooth_taps,
    sources,
    triangle,
)

X = np.random.default_rng(0).normal(size=(1, 2, 6, 7))
FILTERS = {"bilinear": (triangle, 1), "bicubic": (lambda x: cubic(x, -0.5), 2)}


def resized(x, taps):
    for axis, one in enumerate(taps, 2):
        x = resample(x, axis, one)
    return x


@pytest.mark.parametrize(
    ("mode", "size", "corners"),
    [("linear", (9, 3), True), ("cubic", (9, 3), False), ("cubic", (1, 14), True)],
)
def test_smooth_modes(mode, size, corners, x64):
    x = torch.from_numpy(X)
    want = F.interpolate(x, size, mode=f"bi{mode}", align_corners=corners)
    taps = [
        smooth_taps(mode, np.arange(count), rows, count, align_corners=corners)
        for rows, count in zip(X.shape[2:], size, strict=True)
    ]
    np.testing.assert_allclose(resized(jnp.asarray(X), taps), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("mode", "scale"), [("linear", 1.7), ("cubic", 0.6)])
def test_a_scale_beats_the_ratio_of_sizes(mode, scale, x64):
    want = F.interpolate(torch.from_numpy(X), scale_factor=(scale, scale), mode=f"bi{mode}")
    taps = [
        smooth_taps(mode, np.arange(count), rows, count, align_corners=False, scale=scale)
        for rows, count in zip(X.shape[2:], want.shape[2:], strict=True)
    ]
    np.testing.assert_allclose(resized(jnp.asarray(X), taps), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", FILTERS)
def test_filters_against_aliasing(name):
    size = (3, 9)
    want = F.interpolate(torch.from_numpy(X), size, mode=name, antialias=True)
    got = X
    for axis, count in enumerate(size, 2):
        rows = X.shape[axis]
        where = sources(np.arange(count), rows, count, align_corners=False)
        squeezed = min(count / rows, 1.0)
        taps = filter_taps(where, rows, *FILTERS[name], squeezed=squeezed, exclude_outside=True)
        matrix = matrix_of(Taps(*taps), rows)
        got = np.moveaxis(np.tensordot(got, matrix, (axis, 1)), -1, axis)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_parts_of_the_outputs_are_those_of_all():
    some, every = (
        smooth_taps("cubic", outputs, 5, 8, align_corners=False)
        for outputs in (np.arange(3, 6), np.arange(8))
    )
    np.testing.assert_array_equal(some.indices, every.indices[:, 3:6])
    np.testing.assert_array_equal(some.weights, every.weights[:, 3:6])


def test_nearest_elements_are_taken_or_repeated():
    x = jnp.arange(6).reshape(2, 3)
    assert resample(x, 1, Taps(np.array([[2, 0]]), None)).tolist() == [[2, 0], [5, 3]]
    assert resample(x, 0, Taps(np.array([[0, 0, 1, 1]]), None)).shape == (4, 3)
