"""Fractional max pooling against CPU torch, with the same random places."""

from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.harness import check

aten = torch.ops.aten


def image(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("output", [(3, 4), (1, 5), (2, 1)])
@pytest.mark.parametrize("lead", [(2, 3), (3,)])
def test_two_dimensions(lead, output):
    x, samples = image(*lead, 7, 9), torch.rand(2, 3, 2)
    check(aten.fractional_max_pool2d.default, x, [2, 3], list(output), samples)
    out, places = aten.fractional_max_pool2d(x, [2, 3], list(output), samples)
    grad = image(*out.shape)
    check(aten.fractional_max_pool2d_backward.default, grad, x, [2, 3], list(output), places)


def test_three_dimensions():
    x, samples = image(2, 3, 5, 6, 7), torch.rand(2, 3, 3)
    sizes = [2, 3, 2], [3, 2, 4]
    check(aten.fractional_max_pool3d.default, x, *sizes, samples)
    out, places = aten.fractional_max_pool3d(x, *sizes, samples)
    check(aten.fractional_max_pool3d_backward.default, image(*out.shape), x, *sizes, places)


def test_nothing_and_nan():
    samples = torch.rand(2, 3, 2)
    check(aten.fractional_max_pool2d.default, image(0, 3, 5, 5), [2, 2], [2, 2], samples)
    x = image(2, 3, 5, 5)
    x[0, 0, 1:3, 1:3] = float("nan")
    check(aten.fractional_max_pool2d.default, x, [3, 3], [2, 2], samples)
