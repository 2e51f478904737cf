"""Matrices that cannot be factorised: an error at once, NaN inside a captured step."""

from __future__ import annotations

import pytest
import torch

import isoshard.torch_bridge as xs

SINGULAR = torch.tensor([[1.0, 2.0], [2.0, 4.0]])
CASES = {
    "inv": (torch.linalg.inv, "linalg.inv: The diagonal element 2 is zero"),
    "solve": (lambda a: torch.linalg.solve(a, a), "The solver failed because the input matrix is"),
    "cholesky": (lambda a: torch.linalg.cholesky(-a), "the input is not positive-definite"),
}


@pytest.mark.parametrize("name", CASES)
def test_raised_at_once(name):
    function, message = CASES[name]
    with pytest.raises(torch.linalg.LinAlgError, match=message):
        function(SINGULAR.to("jax"))


def test_the_ex_variant_asks_nothing():
    inverse, info = torch.linalg.inv_ex(SINGULAR.to("jax"))
    assert int(info) == 2 and not bool(inverse.isfinite().all())


def test_captured_steps_may_factorise():
    @xs.compile
    def step(a):
        return torch.linalg.inv(a), torch.linalg.cholesky(a)

    a = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    for _ in range(2):
        inverse, factor = step(a.to("jax"))
    torch.testing.assert_close(inverse.cpu(), torch.linalg.inv(a))
    torch.testing.assert_close(factor.cpu(), torch.linalg.cholesky(a))
    _, factor = step(-a.to("jax"))
    assert bool(factor.isnan().any())
