"""Bessel functions, polynomials, zeta, incomplete gamma and Dirichlet's gradient: at every seam."""

from __future__ import annotations

import numpy as np
import torch

import isoshard.torch_bridge  # noqa: F401  (registers the device)
from tests.torch_bridge.lowerings.harness import evaluate, together
from tests.torch_bridge.lowerings.samples import INF, NAN, POSITIVE

aten = torch.ops.aten


def test_bessel_and_airy_functions_on_both_sides_of_every_seam():
    points = [-9.0, -5.1, -4.9, -2.2, -2.0, -0.4, 0.0, 1e-6, 0.3, 0.6, 1.9, 2.05, 2.2, 4.9, 5.1, 9]
    with together(rtol=1e-4, atol=2e-6) as check:
        for name in """bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1
        modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1
        spherical_bessel_j0 airy_ai""".split():
            op = getattr(aten, f"special_{name}").default
            check(op, torch.tensor([*points, 20.0]))
        check(op, torch.tensor([1, 2, 7]))


POLYNOMIALS = [
    *(f"{shift}chebyshev_polynomial_{kind}" for shift in ("", "shifted_") for kind in "tuvw"),
    "hermite_polynomial_h",
    "hermite_polynomial_he",
    "laguerre_polynomial_l",
    "legendre_polynomial_p",
]


def test_orthogonal_polynomials_by_tensor_and_number():
    """Of negative and of broken degrees, at the ends of their intervals and beyond."""
    points = torch.tensor([-1.0, -0.7, 0.0, 0.2, 0.5, 0.9, 1.0, 1.3])
    degrees = torch.tensor([-1.0, 0.0, 1.0, 2.0, 3.7, 6.0])
    with together(rtol=1e-3, atol=1e-4) as check:
        for name in POLYNOMIALS:
            packet = getattr(aten, f"special_{name}")
            check(packet.default, points[:, None], degrees)
            if name in POLYNOMIALS[::4]:
                check(packet.x_scalar, 0.3, degrees)
                check(packet.n_scalar, points, 5)
            if "hermite" in name:  # NaN of huge degrees, and 0 of none
                check(packet.n_scalar, points, 200)
                ends = torch.tensor([INF, -INF, NAN, -1.0, 2.0])
                check(packet.default, torch.full((5,), 0.5), ends)


def test_zeta_and_polygamma():
    """Left of 0, at the poles, at both ends; in place."""
    left = torch.tensor([-0.3, -1.6, -2.5, -7.9506, 0.2, 0.45, 3.0])
    ends = torch.tensor([0.0, -0.0, 1, 2.5, INF, -INF, NAN, -2.5, 1e20, 0.5])
    with together(rtol=2e-3, atol=1e-3) as check:
        polygamma = aten.polygamma.default
        for n in (0, 1):
            check(polygamma, n, POSITIVE, rtol=1e-4, atol=2e-5)
        for n in (1, 2, 6):
            poles = torch.tensor([-1.0, -4.0] if n == 2 else [2.3, 2.4])
            check(polygamma, n, torch.cat([left, poles]))
        check(polygamma, 2, ends, rtol=1.3e-6, atol=1e-5)
        exponents = torch.tensor([[2.0], [3.0], [1.0], [0.5], [2.5]])
        zeta = aten.special_zeta.default
        check(zeta, exponents, left, rtol=1e-3, atol=1e-4)
        check(zeta, exponents, torch.tensor([0.0, -2.0, NAN]), rtol=2e-5)
        check(zeta, ends[:, None], ends, rtol=1.3e-6, atol=1e-5)
        check(zeta, POSITIVE + 1.5, POSITIVE, rtol=1e-4, atol=2e-5)
    x = left.clone().to("jax")
    x.polygamma_(2)
    torch.testing.assert_close(x.cpu(), torch.polygamma(2, left), rtol=2e-3, atol=1e-3)


PARTS = [torch.special.gammainc, torch.special.gammaincc]


def test_incomplete_gamma_near_its_step():
    """P(a, x) and Q(a, x) in 32 bits against float64, in which CPU torch is 7e-10 off itself."""
    random = np.random.default_rng(0)
    a = np.concatenate(
        [random.uniform(*span, 1000) for span in ((1e-3, 20), (20, 200), (200, 3e3), (3e3, 1e6))]
    )
    x = a * (1 + random.normal(size=a.size) * np.minimum(0.2, 3 / np.sqrt(a)))
    single = [torch.tensor(values, dtype=torch.float32) for values in (a, x.clip(0))]
    double = [torch.tensor(values)[(a > 500) & (a < 1e5)] for values in (a, x)]
    runs = [*zip(PARTS, (single, double), strict=True)]
    found = [part(*(t.to("jax") for t in given)) for part, given in runs]
    for have, (part, given) in zip(found, runs, strict=True):
        near = {"rtol": 5e-5, "atol": 4e-6} if given is single else {"rtol": 2e-9, "atol": 1e-12}
        torch.testing.assert_close(have.cpu().double(), part(*(t.double() for t in given)), **near)


def test_incomplete_gamma_at_the_ends():
    pairs = []
    for part, dtype in zip(PARTS, (torch.bfloat16, torch.float64), strict=True):
        ends = torch.tensor([0.0, -0.0, 1.0, -1.0, 30.0, 300.0, 1e30, INF, NAN], dtype=dtype)
        a, x = torch.meshgrid(ends, ends, indexing="ij")
        pairs.append((part(a.to("jax"), x.to("jax")), part(a, x)))
    for have, want in pairs:
        torch.testing.assert_close(have.cpu(), want, equal_nan=True, rtol=1e-2, atol=1e-5)


def beta_draws(low: float, high: float) -> tuple[torch.Tensor, ...]:
    """Beta draws, their alpha, and alpha + beta; both between powers of ten."""
    source = torch.Generator().manual_seed(0)
    alpha, beta = 10 ** (low + (high - low) * torch.rand(2, 1000, generator=source))
    x = torch.distributions.Beta(alpha, beta).sample().clamp(1e-6, 1 - 1e-6)
    return x, alpha, alpha + beta


def test_gradients_of_dirichlet_draws_in_every_region_of_torchs_approximation():
    """By the size of the concentrations, near the mean of large ones, and at 0 and 1."""
    spans = [beta_draws(low, high) for low, high in ((-1, 1), (0.8, 2), (2, 4))]
    alpha, beta = torch.tensor([7.0, 50.0, 9000.0]), torch.tensor([9.0, 8.0, 5000.0])
    mean, total = alpha / (alpha + beta), alpha + beta
    deviation = (mean * (1 - mean) / (total + 1)).sqrt()
    for away in (-0.2, -0.11, -0.09, 0.0, 0.09, 0.11, 0.2):
        spans.append((mean + away * deviation, alpha, total))
    ends = torch.tensor([0.1, 0.1, 9.0, 9.0])
    spans.append((torch.tensor([0.0, 1.0, 0.0, 1.0]), ends, ends + 8))
    x, alpha, total = (torch.cat(parts) for parts in zip(*spans, strict=True))
    (got,) = evaluate(aten._dirichlet_grad.default, x, alpha, total)
    np.testing.assert_allclose(got, aten._dirichlet_grad(x, alpha, total), rtol=1e-3)
