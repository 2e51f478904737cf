"""Zeta and polygamma against CPU torch, also left of 0 and at the poles."""

from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.harness import check

aten = torch.ops.aten
LEFT = torch.tensor([-0.3, -1.6, -2.5, -7.9506, 0.2, 0.45, 3.0])


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6])
def test_polygamma(n):
    check(aten.polygamma.default, n, LEFT, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("n", [2, 3])
def test_poles(n):
    check(aten.polygamma.default, n, torch.tensor([0.0, -1.0, -4.0]))


def test_zeta():
    exponents = torch.tensor([[2.0], [3.0], [1.0], [0.5], [2.5]])
    check(aten.special_zeta.default, exponents, LEFT, rtol=1e-3, atol=1e-4)
    check(aten.special_zeta.default, exponents, torch.tensor([0.0, -2.0, float("nan")]))


def test_in_place():
    x = LEFT.clone().to("jax")
    x.polygamma_(2)
    torch.testing.assert_close(x.cpu(), torch.polygamma(2, LEFT), rtol=2e-3, atol=1e-3)
