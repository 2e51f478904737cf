"""Eigenvalues and least squares against CPU torch."""

from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.harness import check, evaluate

aten = torch.ops.aten


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_eigenvalues():
    a = matrix(2, 4, 4)
    check(aten._linalg_eigvals.default, a)
    values, vectors = (torch.from_numpy(x.__array__().copy()) for x in evaluate(
        aten.linalg_eig.default, a
    ))  # fmt: skip
    torch.testing.assert_close(
        a.to(vectors.dtype) @ vectors, vectors * values[..., None, :], rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(vectors.abs().square().sum(-2), torch.ones(2, 4))


def test_gradient_of_eigenvalues():
    a, grads = matrix(4, 4), []
    for leaf in (a.clone().requires_grad_(), a.to("jax").requires_grad_()):
        torch.linalg.eigvals(leaf).abs().sum().backward()
        grads.append(leaf.grad.cpu())
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-3)


def test_no_matrices():
    check(aten.linalg_eig.default, matrix(0, 3, 3))
    check(aten._linalg_eigvals.default, matrix(2, 0, 0))


@pytest.mark.parametrize("driver", [None, "gels", "gelsy", "gelsd", "gelss"])
@pytest.mark.parametrize(("a", "b"), [((5, 3), (5, 2)), ((3, 5), (3, 2)), ((2, 4, 3), (2, 4))])
def test_least_squares(a, b, driver):
    a, b = matrix(*a), matrix(*b, seed=1)
    check(aten.linalg_lstsq.default, a, b, driver=driver, rtol=1e-3, atol=1e-4)


def test_least_squares_of_less_than_full_rank():
    a = matrix(5, 3)
    a[:, 2] = a[:, 0]
    solution, residuals, rank, values = evaluate(
        aten.linalg_lstsq.default, a, matrix(5, 2, seed=1), driver="gelsd"
    )
    want = torch.linalg.lstsq(a, matrix(5, 2, seed=1), driver="gelsd")
    torch.testing.assert_close(torch.tensor(solution.tolist()), want.solution, rtol=1e-3, atol=1e-4)
    assert int(rank) == 2 and values.shape == (3,)
    assert bool((residuals != residuals).all())  # torch, which sees the rank, leaves them out


def test_least_squares_refusals():
    a = matrix(4, 3).to("jax")
    with pytest.raises(RuntimeError, match=r"one of \(gels, gelsy, gelsd, gelss\), got qr"):
        aten.linalg_lstsq(a, a, driver="qr")
    with pytest.raises(RuntimeError, match=r"input.size.-2. should match other.size.-2."):
        torch.linalg.lstsq(a, a[:2])


@pytest.mark.parametrize("lead", [(), (2,)])
def test_columns_lie_one_after_the_other(lead):
    a, b = matrix(*lead, 3, 5), matrix(*lead, 3, 2)
    square = matrix(*lead, 4, 4)
    for function, given in ((torch.linalg.lstsq, (a, b)), (torch.linalg.eig, (square,))):
        got = function(*(each.to("jax") for each in given))
        for one, other in zip(got, function(*given), strict=True):
            assert one.stride() == other.stride()
