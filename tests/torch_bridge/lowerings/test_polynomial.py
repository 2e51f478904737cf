"""Orthogonal polynomials against CPU torch: tensor and number degrees, ends, negative degrees."""

from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.harness import check

NAMES = [
    *(f"{shift}chebyshev_polynomial_{kind}" for shift in ("", "shifted_") for kind in "tuvw"),
    "hermite_polynomial_h",
    "hermite_polynomial_he",
    "laguerre_polynomial_l",
    "legendre_polynomial_p",
]
POINTS = torch.tensor([-1.0, -0.7, 0.0, 0.2, 0.5, 0.9, 1.0, 1.3])


@pytest.mark.parametrize("name", NAMES)
def test_values(name):
    packet = getattr(torch.ops.aten, f"special_{name}")
    degrees = torch.tensor([-1.0, 0.0, 1.0, 2.0, 3.7, 6.0])
    check(packet.default, POINTS[:, None], degrees, rtol=1e-3, atol=1e-4)
    check(packet.n_scalar, POINTS, 5, rtol=1e-3, atol=1e-4)
    check(packet.x_scalar, 0.3, degrees, rtol=1e-3, atol=1e-4)
    check(packet.n_scalar, POINTS, 0)


@pytest.mark.parametrize("name", ["h", "he"])
def test_hermite_polynomials_of_huge_degree_are_nan(name):
    packet = getattr(torch.ops.aten, f"special_hermite_polynomial_{name}")
    check(packet.n_scalar, POINTS, 200)


@pytest.mark.parametrize("name", ["h", "he"])
def test_hermite_polynomials_of_no_degree_are_0(name):
    packet = getattr(torch.ops.aten, f"special_hermite_polynomial_{name}")
    degrees = torch.tensor([float("inf"), float("-inf"), float("nan"), -1.0, 2.0])
    check(packet.default, torch.full((5,), 0.5), degrees)
