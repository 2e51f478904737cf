"""Interpolation against torch's in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from isoshard.core.nn.resizing import (
    Taps,
    cubic,
    cubic_weights,
    filter_taps,
    matrix_of,
    ratio_of,
    resample,
    smooth_taps,
    sources,
    tap_offsets,
    triangle,
)

X = np.random.default_rng(0).normal(size=(1, 2, 6, 7))
FILTERS = {"bilinear": (triangle, 1), "bicubic": (lambda x: cubic(x, -0.5), 2)}


def resized(x, taps):
    for axis, one in enumerate(taps, 2):
        x = resample(x, axis, one)
    return x


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("size", [(9, 3), (1, 14), (6, 7)])
@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_smooth_modes(mode, size, corners, x64):
    x = torch.from_numpy(X)
    want = F.interpolate(x, size, mode=f"bi{mode}", align_corners=corners)
    taps = [
        smooth_taps(mode, np.arange(count), rows, count, align_corners=corners)
        for rows, count in zip(X.shape[2:], size, strict=True)
    ]
    np.testing.assert_allclose(resized(jnp.asarray(X), taps), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("scale", [1.7, 0.6])
def test_a_scale_beats_the_ratio_of_sizes(mode, scale, x64):
    want = F.interpolate(torch.from_numpy(X), scale_factor=(scale, scale), mode=f"bi{mode}")
    taps = [
        smooth_taps(mode, np.arange(count), rows, count, align_corners=False, scale=scale)
        for rows, count in zip(X.shape[2:], want.shape[2:], strict=True)
    ]
    np.testing.assert_allclose(resized(jnp.asarray(X), taps), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [(3, 4), (9, 5)])
@pytest.mark.parametrize("name", FILTERS)
def test_filters_against_aliasing(name, size):
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
    np.testing.assert_array_equal(some.places, every.places[:, 3:6])
    np.testing.assert_array_equal(some.weights, every.weights[:, 3:6])


def test_weights_sum_to_one():
    part = np.linspace(0, 1, 11)
    np.testing.assert_allclose(sum(cubic_weights(part)), 1)
    np.testing.assert_allclose(cubic_weights(part)[0], cubic(1 + part))
    np.testing.assert_allclose(triangle(part) + triangle(1 - part), 1)


def test_wider_filters_read_more():
    assert [*tap_offsets(1)] == [0, 1]
    assert [*tap_offsets(2)] == [-1, 0, 1, 2]
    assert [*tap_offsets(1, 0.5)] == [-1, 0, 1, 2]


def test_one_output_of_aligned_corners_is_the_first_element():
    assert ratio_of(5, 1, align_corners=True) == 0
    assert ratio_of(5, 3, align_corners=True) == 2
    assert ratio_of(5, 3, scale=0.5, dtype=np.float32) == np.float32(2)


def test_nearest_elements_are_taken_or_repeated():
    x = jnp.arange(6).reshape(2, 3)
    assert resample(x, 1, Taps(np.array([[2, 0]]), None)).tolist() == [[2, 0], [5, 3]]
    assert resample(x, 0, Taps(np.array([[0, 0, 1, 1]]), None)).shape == (4, 3)
