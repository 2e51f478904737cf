"""Pairwise distances against CPU torch, forward and backward."""

from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.harness import check

aten = torch.ops.aten
POWERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, float("inf")]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def points(rows: int, *lead: int) -> torch.Tensor:
    """The first row is the origin in every set, so that one distance is 0."""
    torch.manual_seed(rows)
    x = torch.randn(*lead, rows, 3)
    x[..., 0, :] = 0
    return x


@pytest.mark.parametrize("p", POWERS)
def test_cdist(p):
    check(aten._cdist_forward.default, points(4, 2), points(5, 2), p, None, **CLOSE)


@pytest.mark.parametrize("mode", [None, 0, 1, 2])
@pytest.mark.parametrize("rows", [4, 30])
def test_euclidean_by_matrix_product_or_not(mode, rows):
    check(aten._cdist_forward.default, points(rows), points(5), 2.0, mode, rtol=1e-3, atol=1e-3)


def test_empty():
    check(aten._cdist_forward.default, points(4)[:0], points(5), 2.0, None)
    check(aten._cdist_forward.default, points(4)[:, :0], points(5)[:, :0], 2.0, None)
    check(aten._pdist_forward.default, points(1), 2.0)


@pytest.mark.parametrize("p", POWERS)
def test_cdist_backward(p):
    a, b = points(4, 2), points(5, 2)
    distances = aten._cdist_forward(a, b, p, 2)
    grad = torch.rand_like(distances)
    check(aten._cdist_backward.default, grad, a, b, p, distances, **CLOSE)


@pytest.mark.parametrize("shapes", [((5, 3), (2, 4, 3)), ((0, 5, 3), (4, 3)), ((5, 0), (4, 0))])
def test_cdist_backward_of_batches_and_of_nothing(shapes):
    a, b = (torch.randn(shape) for shape in shapes)
    distances = aten._cdist_forward(a, b, 2.0, 2)
    check(aten._cdist_backward.default, torch.ones_like(distances), a, b, 2.0, distances, **CLOSE)


@pytest.mark.parametrize("p", POWERS)
def test_pdist(p):
    x = points(5)
    check(aten._pdist_forward.default, x, p, **CLOSE)
    distances = aten._pdist_forward(x, p)
    check(aten._pdist_backward.default, torch.rand_like(distances), x, p, distances, **CLOSE)
