"""Operators that torch makes of float64 tensors inside, while JAX holds none."""

from __future__ import annotations

import pytest
import torch

import isoshard.torch_bridge  # noqa: F401  (registers the device)

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
CASES = {
    "pinverse": torch.pinverse,
    "pinv": torch.linalg.pinv,
    "pinv with a tolerance": lambda x: torch.linalg.pinv(x, rtol=0.3),
    "rank": torch.linalg.matrix_rank,
    "rank above": lambda x: torch.linalg.matrix_rank(x, tol=0.3),
    "rank with tolerances": lambda x: torch.linalg.matrix_rank(x, atol=0.1, rtol=0.5),
    "rank of a symmetric": lambda x: torch.linalg.matrix_rank(x @ x.T, hermitian=True),
    "rank of nothing": lambda x: torch.linalg.matrix_rank(x[:0]),
    "renorm": lambda x: torch.renorm(x, 2, 0, 0.5),
    "renorm in half precision": lambda x: torch.renorm(x.bfloat16(), 1, 1, 0.5).float(),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    got = []
    for device in ("cpu", "jax"):
        x = X.detach().to(device).requires_grad_()
        out = CASES[name](x)
        if out.requires_grad:
            out.sum().backward()
        got.append((out.detach().cpu(), None if x.grad is None else x.grad.cpu()))
    rtol = 1e-2 if "half" in name else 1e-3
    torch.testing.assert_close(got[1], got[0], rtol=rtol, atol=1e-4)


def test_without_autograd():
    x = X.to("jax")
    with torch.inference_mode():
        assert int(torch.linalg.matrix_rank(x)) == 3
    with torch.no_grad():
        out = torch.empty(0, dtype=torch.int64, device="jax")
        torch.linalg.matrix_rank(x, out=out)
        assert int(out) == 3
        x.renorm_(2, 0, 0.5)
    torch.testing.assert_close(x.cpu(), X.renorm(2, 0, 0.5))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 0, -1.0), "expected maxnorm to be >= 0 but got -1.0"),
        ((-1, 0, 1.0), "non-positive norm not supported, got -1"),
    ],
)
def test_renorm_refusals(arguments, message):
    with pytest.raises(RuntimeError, match=message):
        torch.renorm(X.to("jax"), *arguments)


def test_renorm_gives_row_major_order():
    x = torch.ones(2, 3, 4).permute(2, 0, 1)
    want = torch.renorm(x, 2, 1, 0.5)
    got = torch.renorm(x.to("jax"), 2, 1, 0.5)
    assert got.stride() == want.stride()
    torch.testing.assert_close(got.cpu(), want)


def test_renorm_wants_two_axes():
    with pytest.raises(RuntimeError, match="at least 2 dimensions, got 1"):
        torch.renorm(torch.ones(3, device="jax"), 2, 0, 1.0)


@pytest.mark.parametrize("function", [torch.matmul, torch.kron])
@pytest.mark.parametrize("given", [True, False])
def test_results_in_a_given_tensor(function, given):
    a, b = X.expand(2, 4, 3).contiguous(), X[:3]
    want = function(a, b)
    out = torch.zeros(want.shape if given else (0,), device="jax")
    assert function(a.to("jax"), b.to("jax"), out=out) is out
    torch.testing.assert_close(out.cpu(), want)
    with pytest.raises(RuntimeError, match=r"can't be cast to .* torch\.int64"):
        function(a.to("jax"), b.to("jax"), out=out.long())


def test_renorm_of_an_axis_that_is_not_there():
    for x in (X, X.to("jax")):
        with pytest.raises(IndexError, match="Dimension out of range"):
            torch.renorm(x, 2, x.dim(), 1.0)
