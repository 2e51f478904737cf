"""Pairwise distances against CPU torch, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.torch_bridge.lowerings.harness import check, evaluate

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


def test_cdist_backward_sums_over_batches_the_operand_has_not():
    a, b = points(5), points(4, 3)
    distances = aten._cdist_forward(a.expand(3, 5, 3), b, 2.0, 2)
    for operand in a, a[None]:
        (got,) = evaluate(
            aten._cdist_backward.default, torch.ones_like(distances), operand, b, 2.0, distances
        )
        alone = [
            aten._cdist_backward(torch.ones(5, 4), a, one, 2.0, d)
            for one, d in zip(b, distances, strict=True)
        ]
        np.testing.assert_allclose(got.reshape(a.shape), sum(alone), **CLOSE)


@pytest.mark.parametrize("p", POWERS)
def test_pdist(p):
    x = points(5)
    check(aten._pdist_forward.default, x, p, **CLOSE)
    distances = aten._pdist_forward(x, p)
    check(aten._pdist_backward.default, torch.rand_like(distances), x, p, distances, **CLOSE)
