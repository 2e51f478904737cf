"""Resizing and sampling of images against CPU torch, forward and backward."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from isoshard.torch_bridge.lowerings import registry
from tests.torch_bridge.lowerings.harness import check, evaluate, to_array

aten = torch.ops.aten
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def randn(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape)


def resize_and_back(name: str, x: torch.Tensor, size: list[int], *options) -> None:
    check(getattr(aten, name).default, x, size, *options, **CLOSE)
    grad = torch.randn(*x.shape[:2], *size)
    backward = getattr(aten, f"{name}_backward").default
    check(backward, grad, size, list(x.shape), *options, **CLOSE)


SIZES = {1: ((2, 3, 5), [[10], [7], [3], [1]]), 2: ((2, 3, 4, 5), [[8, 10], [6, 3], [1, 9]])}
SIZES[3] = ((1, 2, 3, 4, 2), [[6, 8, 4], [5, 2, 3]])
LINEAR = {1: "upsample_linear1d", 2: "upsample_bilinear2d", 3: "upsample_trilinear3d"}


@pytest.mark.parametrize("kind", ["upsample_nearest", "_upsample_nearest_exact"])
@pytest.mark.parametrize("rank", SIZES)
def test_nearest(kind, rank):
    shape, sizes = SIZES[rank]
    for size in sizes:
        resize_and_back(f"{kind}{rank}d", randn(*shape), size)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("rank", SIZES)
def test_linear(rank, align_corners):
    shape, sizes = SIZES[rank]
    for size in sizes:
        resize_and_back(LINEAR[rank], randn(*shape), size, align_corners)


@pytest.mark.parametrize("align_corners", [False, True])
def test_cubic(align_corners):
    shape, sizes = SIZES[2]
    for size in sizes:
        resize_and_back("upsample_bicubic2d", randn(*shape), size, align_corners)


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_positions_of_float64_are_float64(mode, antialias):
    """As torch's: in float32 they were off by 1e-6."""
    whole = randn(2, 3, 7, 9).double()
    with jax.enable_x64(True):
        for size, align_corners in itertools.product([(13, 22), (3, 4)], [False, True]):
            options = {"mode": mode, "align_corners": align_corners, "antialias": antialias}
            found = []
            for device in ("cpu", "jax"):
                x = whole.detach().to(device).requires_grad_()
                resized = F.interpolate(x, size, **options)
                resized.square().sum().backward()
                found.append((resized.detach().cpu(), x.grad.cpu()))
            for expected, actual in zip(*found, strict=True):
                assert actual.dtype == torch.float64
                torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [1.7, 0.6, 2.0])
def test_given_scale_beats_the_ratio_of_sizes(scale):
    x = randn(2, 3, 5, 6)
    size = [int(5 * scale), int(6 * scale)]
    resize_and_back("upsample_nearest2d", x, size, scale, scale)
    resize_and_back("upsample_bilinear2d", x, size, False, scale, scale)
    resize_and_back("upsample_bicubic2d", x, size, False, scale, scale)


def test_bfloat16():
    x = randn(2, 3, 4, 5).bfloat16()
    check(aten.upsample_nearest2d.default, x, [8, 7])
    check(aten.upsample_bilinear2d.default, x, [8, 7], False, rtol=2e-2, atol=2e-2)


def test_whole_factors_need_no_gather():
    function = registry.find(aten.upsample_nearest2d.default).function
    text = str(jax.make_jaxpr(lambda x: function(x, [8, 10]))(to_array(randn(1, 1, 4, 5))))
    assert "gather" not in text


# Grid sample

BILINEAR, NEAREST, BICUBIC = 0, 1, 2
MODES = list(itertools.product([BILINEAR, NEAREST], [0, 1, 2], [False, True]))
CUBIC_MODES = [(BICUBIC, 0, False), (BICUBIC, 1, True), (BICUBIC, 2, False)]


def grid(*shape: int) -> torch.Tensor:
    """Points inside, outside and far outside the image."""
    return randn(*shape) * 1.3


@pytest.mark.parametrize(("mode", "padding", "align_corners"), MODES + CUBIC_MODES)
def test_grid_sampler_2d(mode, padding, align_corners):
    x, points = randn(2, 3, 4, 5), grid(2, 3, 6, 2)
    check(aten.grid_sampler_2d.default, x, points, mode, padding, align_corners, **CLOSE)
    grad = torch.randn(2, 3, 3, 6)
    arguments = (grad, x, points, mode, padding, align_corners)
    check(aten.grid_sampler_2d_backward.default, *arguments, [True, True], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("mode", "padding", "align_corners"), MODES)
def test_grid_sampler_3d(mode, padding, align_corners):
    x, points = randn(1, 2, 3, 4, 5), grid(1, 2, 3, 2, 3)
    check(aten.grid_sampler_3d.default, x, points, mode, padding, align_corners, **CLOSE)
    grad = torch.randn(1, 2, 2, 3, 2)
    arguments = (grad, x, points, mode, padding, align_corners)
    check(aten.grid_sampler_3d_backward.default, *arguments, [True, True], rtol=1e-3, atol=1e-3)


def test_image_gradient_may_be_left_out():
    x, points = randn(2, 3, 4, 5), grid(2, 3, 6, 2)
    arguments = (torch.randn(2, 3, 3, 6), x, points, 0, 0, False, [False, True])
    of_image, of_grid = evaluate(aten.grid_sampler_2d_backward.default, *arguments)
    assert of_image is None
    np.testing.assert_allclose(of_grid, aten.grid_sampler_2d_backward(*arguments)[1], **CLOSE)
