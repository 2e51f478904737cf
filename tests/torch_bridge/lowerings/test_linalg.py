"""Factorisations, solvers and eigenvalues against CPU torch."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

from isoshard.torch_bridge.lowerings import registry
from tests.torch_bridge.lowerings.harness import evaluate, evaluate_all, to_array, together

aten = torch.ops.aten
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    """Well conditioned: random with a strong diagonal."""
    return randn(*shape, seed=seed) / 4 + torch.eye(*shape[-2:])


def test_factors_and_what_they_solve():
    """Of rows and columns, of none, of one triangle; the operator database has the other forms."""
    with together(**CLOSE) as check:
        check(aten.linalg_inv_ex.default, matrix(0, 0))
        for count in (0, 2):
            check(aten.linalg_matrix_exp.default, matrix(count, 3, 3))
        check(aten.linalg_pinv.atol_rtol_tensor, matrix(0, 3))
        # Of a Hermitian matrix the lower triangle is read.
        check(aten.linalg_pinv.atol_rtol_tensor, matrix(2, 3, 3), hermitian=True)
        check(aten.linalg_lu.default, matrix(2, 4, 3))
        packed, pivots, _ = aten.linalg_lu_factor_ex(matrix(3, 4))
        check(aten.lu_unpack.default, packed, pivots)
        check(aten.linalg_qr.default, matrix(2, 4, 3), "complete")
        check(aten._linalg_solve_ex.default, matrix(2, 3, 3), randn(2, 4, 3), left=False)
        packed, tau = torch.geqrf(randn(5, 3))
        check(aten.ormqr.default, packed, tau, randn(4, 5, seed=1), False, True)
        options = {"upper": True, "left": False, "unitriangular": True}
        check(aten.linalg_solve_triangular.default, matrix(2, 3, 3), randn(2, 4, 3), **options)
        check(aten.linalg_solve_triangular.default, matrix(3, 3), randn(3, 2), upper=False)
    a, rtol = matrix(4, 3), torch.tensor(0.9)
    (got,) = evaluate(aten.linalg_pinv.atol_rtol_tensor, a, rtol=rtol)
    np.testing.assert_allclose(got, torch.linalg.pinv(a, rtol=0.9), atol=1e-5)


@pytest.mark.parametrize("name", ["_linalg_det", "_linalg_slogdet"])
def test_determinants_with_the_factors_that_gradient_formulas_expect(name):
    """Row exchanges change the sign; LU factors are of A or of its transpose, by A's layout."""
    op, count = getattr(aten, name), 1 if name == "_linalg_det" else 2
    given = [matrix(*shape).roll(1, -2) for shape in ((2, 4, 4), (1, 1), (0, 3, 3), (0, 0))]
    for a, found in zip(given, evaluate_all([(op.default, (a,), {}) for a in given]), strict=True):
        for have, want in zip(found[:count], op(a)[:count], strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)
    function = registry.find(op.default).function
    for contiguous in (True, False):
        a = matrix(3, 3).roll(1, -2)
        a = a if contiguous else a.mT.contiguous().mT
        got = jax.jit(function, static_argnames="contiguous")(to_array(a), contiguous=contiguous)
        for have, want in zip(got, op(a), strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_solving_by_a_triangle(upper, dtype):
    """With numbers in the other triangle, which is not read."""
    source = torch.Generator().manual_seed(0)
    factor = torch.randn(2, 3, 3, dtype=dtype, generator=source) / 4 + 2 * torch.eye(3)
    b = torch.randn(2, 3, 4, dtype=dtype, generator=source)
    got = torch.cholesky_solve(b.to("jax"), factor.to("jax"), upper=upper)
    triangle = (factor.triu() if upper else factor.tril()).to(torch.complex128)
    matrices = triangle.mH @ triangle if upper else triangle @ triangle.mH
    inverse = torch.cholesky_inverse(factor.to("jax"), upper=upper)
    for result, want in (
        (got, torch.linalg.solve(matrices, b.to(torch.complex128))),
        (inverse, matrices.inverse()),
    ):
        want = want if dtype.is_complex else want.real
        torch.testing.assert_close(result.cpu(), want.to(dtype), rtol=1e-4, atol=1e-5)


def test_matrices_that_cannot_be_factored_are_reported():
    info = evaluate(aten.linalg_inv_ex.default, torch.tensor([[1.0, 0], [0, 0]]))[1]
    assert int(info) == 2
    a = torch.diag(torch.tensor([1.0, 1.0, -1.0]))
    assert int(evaluate(aten.linalg_cholesky_ex.default, a)[1]) > 0
    with pytest.raises(RuntimeError, match="at least 2 dimensions, but has 1"):
        torch.geqrf(torch.ones(3, device="jax"))
    with pytest.raises(RuntimeError, match="at least 2 dimensions and other at least 1"):
        torch.linalg.lstsq(torch.ones(3, device="jax"), torch.ones(3, device="jax"))


def test_singular_values_and_eigenvalues():
    """Vectors are free in sign, so products are compared."""
    for shape, full in (((4, 3), False), ((2, 3, 4), True)):
        a = matrix(*shape)
        u, s, vh = (np.asarray(x) for x in evaluate(aten._linalg_svd.default, a, full))
        k = s.shape[-1]
        assert u.shape[-1] == (shape[-2] if full else k)
        np.testing.assert_allclose((u[..., :k] * s[..., None, :]) @ vh[..., :k, :], a, atol=1e-5)
    general, symmetric = randn(2, 4, 4), {}
    for uplo in ("L", "U"):  # one triangle is read
        a = matrix(2, 3, 3)
        values, vectors = (np.asarray(x) for x in evaluate(aten._linalg_eigh.default, a, uplo))
        half = a.tril() if uplo == "L" else a.triu()
        symmetric[uplo] = half + half.mT - torch.diag_embed(a.diagonal(dim1=-2, dim2=-1))
        rebuilt = (vectors * values[..., None, :]) @ vectors.swapaxes(-1, -2)
        np.testing.assert_allclose(rebuilt, symmetric[uplo], atol=1e-5)
    with together(**CLOSE) as check:
        check(aten._linalg_svd.default, matrix(3, 4), False, False)
        for uplo, a in symmetric.items():
            check(aten._linalg_eigh.default, a, uplo, False)
        check(aten._linalg_eigvals.default, general)
        check(aten.linalg_eig.default, randn(0, 3, 3))
        check(aten._linalg_eigvals.default, randn(2, 0, 0))
    values, vectors = (torch.tensor(x.tolist()) for x in evaluate(aten.linalg_eig.default, general))
    torch.testing.assert_close(
        general.to(vectors.dtype) @ vectors, vectors * values[..., None, :], rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(vectors.abs().square().sum(-2), torch.ones(2, 4))


def test_gradient_of_eigenvalues():
    grads = []
    for leaf in (randn(4, 4).requires_grad_(), randn(4, 4).to("jax").requires_grad_()):
        torch.linalg.eigvals(leaf).abs().sum().backward()
        grads.append(leaf.grad.cpu())
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-3)


def test_least_squares():
    deficient = randn(5, 3)
    deficient[:, 2] = deficient[:, 0]
    b = randn(5, 2, seed=1)
    with together(rtol=1e-3, atol=1e-4) as check:
        for driver in (None, "gelsy", "gelss"):
            check(aten.linalg_lstsq.default, randn(5, 3), b, driver=driver)
        for one, other in (((3, 5), (3, 2)), ((2, 4, 3), (2, 4))):
            check(aten.linalg_lstsq.default, randn(*one), randn(*other, seed=1), driver="gelsd")
    given = (aten.linalg_lstsq.default, deficient, b)
    solution, residuals, rank, values = evaluate(*given, driver="gelsd")
    want = torch.linalg.lstsq(deficient, b, driver="gelsd")
    torch.testing.assert_close(torch.tensor(solution.tolist()), want.solution, rtol=1e-3, atol=1e-4)
    assert int(rank) == 2 and values.shape == (3,)
    assert bool((residuals != residuals).all())  # torch, which sees the rank, leaves them out
    a = randn(4, 3).to("jax")
    with pytest.raises(RuntimeError, match=r"one of \(gels, gelsy, gelsd, gelss\), got qr"):
        aten.linalg_lstsq(a, a, driver="qr")
    with pytest.raises(RuntimeError, match=r"input.size.-2. should match other.size.-2."):
        torch.linalg.lstsq(a, a[:2])


@pytest.mark.parametrize("lead", [(), (2,)])
def test_columns_lie_one_after_the_other(lead):
    a, b, square = randn(*lead, 3, 5), randn(*lead, 3, 2), randn(*lead, 4, 4)
    for function, given in ((torch.linalg.lstsq, (a, b)), (torch.linalg.eig, (square,))):
        got = function(*(each.to("jax") for each in given))
        for one, other in zip(got, function(*given), strict=True):
            assert one.stride() == other.stride()


def symmetric(n: int, seed: int, *, zeros: bool = False) -> torch.Tensor:
    a = randn(n, n, seed=seed)
    a = a + a.T
    return a.fill_diagonal_(0) if zeros else a


def test_bunch_kaufman_factors():
    """With pivots of size 1 and 2, of singular matrices too; and what they solve."""
    real, imaginary = randn(4, 4), randn(4, 4, seed=1)
    right = torch.complex(real[:, :2], imaginary[:, 1:3]).contiguous()
    factor, solve = aten.linalg_ldl_factor_ex.default, aten.linalg_ldl_solve.default
    with together(**CLOSE) as check:
        check(factor, torch.stack([symmetric(5, seed, zeros=True) for seed in range(4)]))
        a = torch.complex(real, imaginary)
        a = a + a.mH
        check(factor, a, hermitian=True)
        packed, pivots = torch.linalg.ldl_factor(a, hermitian=True)
        check(solve, packed, pivots, right, hermitian=True)
        a = torch.stack([symmetric(5, seed, zeros=seed > 0) for seed in range(3)])
        packed, pivots = torch.linalg.ldl_factor(a)
        check(solve, packed, pivots, randn(3, 5, 2, seed=9), rtol=1e-2)
