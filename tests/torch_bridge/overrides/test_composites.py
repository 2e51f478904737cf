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


def test_values_and_gradients():
    found = {}
    for device in ("cpu", "jax"):
        for name, function in CASES.items():
            x = X.detach().to(device).requires_grad_()
            out = function(x)
            if out.requires_grad:
                out.sum().backward()
            found[device, name] = [out.detach()] if x.grad is None else [out.detach(), x.grad]
    for name in CASES:
        got, want = ([t.cpu() for t in found[device, name]] for device in ("jax", "cpu"))
        rtol = 1e-2 if "half" in name else 1e-3
        torch.testing.assert_close(got, want, rtol=rtol, atol=1e-4, msg=name)


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


def test_renorm_gives_row_major_order():
    x = torch.ones(2, 3, 4).permute(2, 0, 1)
    want = torch.renorm(x, 2, 1, 0.5)
    got = torch.renorm(x.to("jax"), 2, 1, 0.5)
    assert got.stride() == want.stride()
    torch.testing.assert_close(got.cpu(), want)


def test_renorm_refusals():
    x = X.to("jax")
    for arguments, message in (
        ((x, 2, 0, -1.0), "expected maxnorm to be >= 0 but got -1.0"),
        ((x, -1, 0, 1.0), "non-positive norm not supported, got -1"),
        ((x[0], 2, 0, 1.0), "at least 2 dimensions, got 1"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.renorm(*arguments)
    for x in (X, X.to("jax")):
        with pytest.raises(IndexError, match="Dimension out of range"):
            torch.renorm(x, 2, x.dim(), 1.0)


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
