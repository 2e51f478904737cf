"""How Dirichlet draws move with their concentrations, in every region of torch's approximation."""

import numpy as np
import pytest
import torch

from tests.torch_bridge.lowerings.harness import check, evaluate

aten = torch.ops.aten
DRAWS = 2000


def draws(low: float, high: float) -> tuple[torch.Tensor, ...]:
    """Beta draws, their alpha, and alpha + beta; both between powers of ten."""
    source = torch.Generator().manual_seed(0)
    alpha, beta = 10 ** (low + (high - low) * torch.rand(2, DRAWS, generator=source))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.distributions.Beta(alpha, beta).sample().clamp(1e-6, 1 - 1e-6)
    return x, alpha, alpha + beta


@pytest.mark.parametrize(("low", "high"), [(-1, 1), (0.8, 2), (2, 4)])
def test_against_torch(low, high):
    check(aten._dirichlet_grad.default, *draws(low, high), rtol=1e-3, atol=0)


def test_near_the_mean():
    alpha, beta = torch.tensor([7.0, 50.0, 9000.0]), torch.tensor([9.0, 8.0, 5000.0])
    mean, total = alpha / (alpha + beta), alpha + beta
    deviation = (mean * (1 - mean) / (total + 1)).sqrt()
    for away in (-0.2, -0.11, -0.09, 0.0, 0.09, 0.11, 0.2):
        arguments = mean + away * deviation, alpha, total
        check(aten._dirichlet_grad.default, *arguments, rtol=1e-3, atol=0)


def test_ends_are_finite():
    x, alpha = torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.tensor([0.1, 0.1, 9.0, 9.0])
    (got,) = evaluate(aten._dirichlet_grad.default, x, alpha, alpha + 8)
    want = aten._dirichlet_grad(x, alpha, alpha + 8)
    np.testing.assert_allclose(got, want, rtol=1e-3)


@pytest.mark.parametrize("family", ["Dirichlet", "Beta"])
def test_gradients_of_draws_on_the_device(family):
    torch.manual_seed(0)
    first = torch.tensor([[0.5, 2.0, 8.0], [20.0, 9.0, 7.0]], device="jax", requires_grad=True)
    if family == "Dirichlet":
        draw = torch.distributions.Dirichlet(first).rsample()
    else:
        draw = torch.distributions.Beta(first, first.detach() + 1).rsample()
    weights = torch.arange(6.0).reshape(2, 3)
    (draw * weights.to("jax")).sum().backward()
    x, alpha = draw.detach().cpu(), first.detach().cpu()
    if family == "Dirichlet":
        slope = torch._dirichlet_grad(x, alpha, alpha.sum(-1, True).expand_as(alpha))
        want = slope * (weights - (x * weights).sum(-1, True))
    else:
        want = torch._dirichlet_grad(x, alpha, 2 * alpha + 1) * (1 - x) * weights
    torch.testing.assert_close(first.grad.cpu(), want, rtol=2e-3, atol=1e-5)
