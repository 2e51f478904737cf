"""Householder reflectors against CPU torch."""

from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.harness import check

aten = torch.ops.aten


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (2, 4, 4), (0, 3)])
def test_geqrf(shape):
    check(aten.geqrf.default, matrix(*shape))


def test_products_of_reflectors():
    packed, tau = torch.geqrf(matrix(2, 5, 3))
    check(aten.linalg_householder_product.default, packed, tau)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("left", [True, False])
def test_ormqr(left, transpose):
    packed, tau = torch.geqrf(matrix(5, 3))
    other = matrix(5, 4, seed=1) if left else matrix(4, 5, seed=1)
    check(aten.ormqr.default, packed, tau, other, left, transpose)


def test_geqrf_wants_a_matrix():
    with pytest.raises(RuntimeError, match="at least 2 dimensions, but has 1"):
        torch.geqrf(torch.ones(3, device="jax"))
