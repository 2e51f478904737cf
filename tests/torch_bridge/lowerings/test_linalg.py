"""Factorisations and solvers against CPU torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from isoshard.torch_bridge.lowerings import registry
from tests.torch_bridge.lowerings.harness import check, evaluate, to_array

aten = torch.ops.aten
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    """Well conditioned: random with a strong diagonal."""
    torch.manual_seed(seed)
    a = torch.randn(shape) / 4
    return a + torch.eye(*shape[-2:])


def positive(*shape: int) -> torch.Tensor:
    a = matrix(*shape)
    return a @ a.mT + torch.eye(shape[-1])


SQUARE = [(3, 3), (2, 4, 4), (1, 1), (0, 3, 3), (0, 0)]


@pytest.mark.parametrize("shape", SQUARE)
def test_inverse(shape):
    check(aten.linalg_inv_ex.default, matrix(*shape), **CLOSE)


@pytest.mark.parametrize("shape", [(3, 3), (2, 4, 4), (2, 4, 3), (3, 4)])
def test_lu(shape):
    check(aten.linalg_lu_factor_ex.default, matrix(*shape), **CLOSE)
    check(aten.linalg_lu.default, matrix(*shape), **CLOSE)
    packed, pivots, _ = aten.linalg_lu_factor_ex(matrix(*shape))
    check(aten.lu_unpack.default, packed, pivots, **CLOSE)


@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_lu_solve(left, adjoint):
    packed, pivots, _ = aten.linalg_lu_factor_ex(matrix(2, 4, 4))
    right = torch.randn(2, 4, 3) if left else torch.randn(2, 3, 4)
    options = {"left": left, "adjoint": adjoint}
    check(aten.linalg_lu_solve.default, packed, pivots, right, **options, **CLOSE)


@pytest.mark.parametrize("name", ["_linalg_det", "_linalg_slogdet"])
@pytest.mark.parametrize("shape", SQUARE)
def test_determinant(name, shape):
    """Row exchanges change the sign; the first results are the answer, the rest are factors."""
    a = matrix(*shape).roll(1, -2)
    count = 1 if name == "_linalg_det" else 2
    got = evaluate(getattr(aten, name).default, a)[:count]
    for have, want in zip(got, getattr(aten, name)(a)[:count], strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("a", "b", "left"),
    [
        ((3, 3), (3, 2), True),
        ((3, 3), (3,), True),
        ((2, 3, 3), (2, 3), True),
        ((2, 3, 3), (2, 3, 4), True),
        ((3, 3), (2, 3), False),
        ((2, 3, 3), (2, 4, 3), False),
    ],
)
def test_solve(a, b, left):
    a, b = matrix(*a), torch.randn(b)
    check(aten._linalg_solve_ex.default, a, b, left=left, **CLOSE)


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("name", ["_linalg_det", "_linalg_slogdet"])
def test_gradient_formulas_find_the_factors_they_expect(name, contiguous):
    """torch's backward of these reads LU factors, of A or of its transpose by A's layout."""
    a = matrix(3, 3)
    a = a if contiguous else a.mT.contiguous().mT
    function = registry.find(getattr(aten, name).default).function
    got = function(to_array(a), contiguous=contiguous)
    want = getattr(aten, name)(a)
    for have, wish in zip(got, want, strict=True):
        np.testing.assert_allclose(have, wish, rtol=1e-4, atol=1e-5)


def test_singular_matrix_is_reported():
    info = evaluate(aten.linalg_inv_ex.default, torch.tensor([[1.0, 0], [0, 0]]))[1]
    assert int(info) == 2


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_triangular(upper, unit, left):
    a = matrix(2, 3, 3)
    b = torch.randn(2, 3, 4) if left else torch.randn(2, 4, 3)
    options = {"upper": upper, "left": left, "unitriangular": unit}
    check(aten.linalg_solve_triangular.default, a, b, **options, **CLOSE)


@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
@pytest.mark.parametrize("transpose", [False, True])
def test_old_triangular(transpose):
    check(aten.triangular_solve.default, torch.randn(3, 2), matrix(3, 3), True, transpose, **CLOSE)


@pytest.mark.parametrize("upper", [False, True])
def test_cholesky(upper):
    a = positive(2, 4, 4)
    check(aten.linalg_cholesky_ex.default, a, upper=upper, **CLOSE)
    if hasattr(aten, "cholesky"):  # gone in torch 2.15
        check(aten.cholesky.default, a, upper, **CLOSE)
    factor = torch.linalg.cholesky(a, upper=upper)
    check(aten.cholesky_inverse.default, factor, upper, **CLOSE)
    check(aten._cholesky_solve_helper.default, torch.randn(2, 4, 3), factor, upper, **CLOSE)


def test_indefinite_matrix_is_reported():
    a = torch.diag(torch.tensor([1.0, 1.0, -1.0]))
    assert int(evaluate(aten.linalg_cholesky_ex.default, a)[1]) > 0


@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (2, 3, 3)])
@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
def test_qr(shape, mode):
    check(aten.linalg_qr.default, matrix(*shape), mode, **CLOSE)


@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (2, 3, 3)])
@pytest.mark.parametrize("full", [False, True])
def test_svd(shape, full):
    """Singular vectors are free in sign, so the product is compared."""
    a = matrix(*shape)
    u, s, vh = (np.asarray(x) for x in evaluate(aten._linalg_svd.default, a, full))
    assert u.shape[-1] == (shape[-2] if full else min(shape[-2:]))
    k = s.shape[-1]
    np.testing.assert_allclose((u[..., :k] * s[..., None, :]) @ vh[..., :k, :], a, atol=1e-5)
    check(aten._linalg_svd.default, a, False, False, **CLOSE)


@pytest.mark.parametrize("uplo", ["L", "U"])
def test_eigh_reads_one_triangle(uplo):
    a = matrix(2, 3, 3)
    values, vectors = (np.asarray(x) for x in evaluate(aten._linalg_eigh.default, a, uplo))
    half = a.tril() if uplo == "L" else a.triu()
    symmetric = half + half.mT - torch.diag_embed(a.diagonal(dim1=-2, dim2=-1))
    rebuilt = (vectors * values[..., None, :]) @ vectors.swapaxes(-1, -2)
    np.testing.assert_allclose(rebuilt, symmetric, atol=1e-5)
    check(aten._linalg_eigh.default, symmetric, uplo, False, **CLOSE)


def test_householder_product():
    check(aten.linalg_householder_product.default, *torch.geqrf(matrix(4, 3)), **CLOSE)


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 5), (0, 3)])
def test_pinv(shape):
    check(aten.linalg_pinv.atol_rtol_tensor, matrix(*shape), **CLOSE)


def test_pinv_of_a_hermitian_matrix_reads_its_lower_triangle():
    check(aten.linalg_pinv.atol_rtol_tensor, matrix(2, 3, 3), hermitian=True, **CLOSE)


def test_pinv_drops_small_singular_values():
    a, rtol = matrix(4, 3), torch.tensor(0.9)
    (got,) = evaluate(aten.linalg_pinv.atol_rtol_tensor, a, rtol=rtol)
    np.testing.assert_allclose(got, torch.linalg.pinv(a, rtol=0.9), atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 3), (2, 2, 2), (0, 0)])
def test_matrix_exp(shape):
    check(aten.linalg_matrix_exp.default, matrix(*shape), **CLOSE)
