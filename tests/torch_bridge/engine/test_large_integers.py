"""Python integers beyond 32 and 64 bits: they wrap, or are refused, where they do on the CPU."""

from __future__ import annotations

import pytest
import torch

import isoshard.torch_bridge  # noqa: F401  (the device)

CONSTANTS = (
    2**31 - 1, 2**31, 3_000_000_000, 2**32 - 1, 2**32, 2**40, 2**62, 2**63 - 1, 2**63,
    -(2**31), -(2**31) - 1, -(2**63),
)  # fmt: skip


def _long(c: int) -> int:
    """Not beyond 64 bits: torch takes one such bound, and refuses it beside another."""
    return min(abs(c), 2**63 - 1)


def _written(i: torch.Tensor, c: int) -> torch.Tensor:
    i = i.clone()
    i[0] = c
    return i


FORMS = {
    "+": lambda i, c: i + c,
    "-": lambda i, c: c - i,
    "*": lambda i, c: i * c,
    "&": lambda i, c: i & c,
    "|": lambda i, c: i | c,
    "^": lambda i, c: i ^ c,
    "<": lambda i, c: i < c,
    "==": lambda i, c: i == c,
    "[0] =": _written,
    "clamp min": lambda i, c: i.clamp(min=c),
    "clamp max": lambda i, c: i.clamp(max=c),
    "clamp_min": torch.clamp_min,
    "clamp_max": torch.clamp_max,
    "both": lambda i, c: i.clamp(-_long(c), _long(c)),
    "hardtanh": lambda i, c: torch.nn.functional.hardtanh(i, min(0, c), max(5, _long(c))),
    "foreach min": lambda i, c: torch._foreach_clamp_min([i], c)[0],
    "foreach max": lambda i, c: torch._foreach_clamp_max([i], c)[0],
    "fill_": lambda i, c: i.clone().fill_(c),
    "masked_fill": lambda i, c: i.masked_fill(i > 1, c),
    "where": lambda i, c: torch.where(i > 1, c, i),
    "add alpha": lambda i, c: torch.add(i, i, alpha=c),
    "/": lambda i, c: i / c,
}
DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.float32)


def outcome(function, tensor: torch.Tensor, constant: int):
    try:
        return function(tensor, constant).cpu()
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_large_integer_does_what_it_does_on_the_cpu(form, dtype):
    host = torch.tensor([1, 3, 2]).to(dtype)
    there = host.to("jax")
    for constant in CONSTANTS:
        want, got = (outcome(FORMS[form], t, constant) for t in (host, there))
        if isinstance(want, type) or isinstance(got, type):
            assert want == got, constant
        else:
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, msg=lambda text, c=constant: f"{c}: {text}")
