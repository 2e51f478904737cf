"""Bessel and Airy functions against CPU torch, on both sides of every seam, and at the ends."""

from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.harness import check

NAMES = """bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1
modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1
spherical_bessel_j0 airy_ai""".split()
POINTS = torch.tensor(
    [-9.0, -5.1, -4.9, -2.2, -2.0, -0.4, 0.0, 1e-6, 0.3, 0.6, 1.9, 2.05, 2.2, 4.9, 5.1, 9.0, 20.0]
)


@pytest.mark.parametrize("name", NAMES)
def test_values(name):
    op = getattr(torch.ops.aten, f"special_{name}").default
    check(op, POINTS, rtol=1e-4, atol=2e-6)
    check(op, torch.tensor([1, 2, 7]), rtol=1e-4)
