"""Bunch-Kaufman factorisations against LAPACK, by CPU torch: pivots of size 1 and 2."""

from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.harness import check

aten = torch.ops.aten


def symmetric(n: int, seed: int, *, zeros: bool = False) -> torch.Tensor:
    made = torch.randn(n, n, generator=torch.Generator().manual_seed(seed))
    made = made + made.T
    return made.fill_diagonal_(0) if zeros else made


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_factors(n, zeros):
    a = torch.stack([symmetric(n, seed, zeros=zeros and n > 1) for seed in range(4)])
    check(aten.linalg_ldl_factor_ex.default, a, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("hermitian", [False, True])
def test_complex_factors_and_solution(hermitian):
    real, imaginary = (
        torch.randn(4, 4, generator=torch.Generator().manual_seed(s)) for s in (0, 1)
    )
    a = torch.complex(real, imaginary)
    a = a + (a.mH if hermitian else a.mT)
    check(aten.linalg_ldl_factor_ex.default, a, hermitian=hermitian, rtol=1e-3, atol=1e-3)
    packed, pivots = torch.linalg.ldl_factor(a, hermitian=hermitian)
    b = torch.complex(real[:, :2], imaginary[:, 1:3]).contiguous()
    check(
        aten.linalg_ldl_solve.default, packed, pivots, b, hermitian=hermitian, rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("zeros", [False, True])
def test_solution(zeros):
    a = torch.stack([symmetric(6, seed, zeros=zeros) for seed in range(3)])
    packed, pivots = torch.linalg.ldl_factor(a)
    b = torch.randn(3, 6, 2, generator=torch.Generator().manual_seed(9))
    check(aten.linalg_ldl_solve.default, packed, pivots, b, rtol=1e-2, atol=1e-3)
    check(aten.linalg_ldl_solve.default, packed, pivots, b[:, :, :0])


def test_singular_matrices_are_told():
    a = torch.zeros(2, 3, 3)
    a[1] = torch.eye(3)
    check(aten.linalg_ldl_factor_ex.default, a)
