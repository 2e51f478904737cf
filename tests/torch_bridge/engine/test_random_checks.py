"""Draws that torch's kernels refuse, but its shape functions let pass."""

from __future__ import annotations

import pytest
import torch

import isoshard.torch_bridge  # noqa: F401  (registers the device)


def floats() -> torch.Tensor:
    return torch.ones(4, device="jax")


CASES = {
    "too many draws": (lambda: torch.multinomial(floats(), 9), "9 of 4"),
    "probability": (lambda: floats().bernoulli_(2.0), r"p to be in \[0, 1\], but got p=2"),
    "empty range": (lambda: floats().random_(5, 5), "from=5 >= to=5"),
    "empty range of integers": (lambda: torch.randint(5, 5, (3,), device="jax"), "5 >= to=5"),
    "range turned round": (lambda: floats().uniform_(2.0, 1.0), "found from=2 > to=1"),
    "integers": (lambda: floats().long().uniform_(), "not implemented for torch.int64"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name):
    floats().bernoulli_(0.5), floats().uniform_(0.5, 2.0)  # right ones before
    function, message = CASES[name]
    with pytest.raises(RuntimeError, match=message):
        function()


def test_accepted():
    assert torch.multinomial(floats(), 9, replacement=True).shape == (9,)
    assert floats().random_(3).shape == (4,)
    assert bool((floats().uniform_(1.0, 1.0) == 1).all())
