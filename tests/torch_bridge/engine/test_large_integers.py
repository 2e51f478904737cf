"""Python integers beyond 32 and 64 bits: they wrap, or are refused, where they do on the CPU."""

from __future__ import annotations

import pytest
import torch

import isoshard.torch_bridge as xs
from tests.torch_bridge.engine.spelled_calls import calls, outcome

CONSTANTS = (
    2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, -(2**31) - 1, -(2**63),
)  # fmt: skip
FORMS = """
    i + c; c - i; i * c; i & c; i | c; i ^ c; i < c; i == c; written(i.clone(), c); i.clamp(min=c)
    i.clamp(max=c); torch.clamp_min(i, c); torch.clamp_max(i, c); i.clamp(-long_c, long_c)
    F.hardtanh(i, min(0, c), max(5, long_c)); torch._foreach_clamp_min([i], c)[0]
    torch._foreach_clamp_max([i], c)[0]; i.clone().fill_(c); i.masked_fill(i > 1, c)
    torch.where(i > 1, c, i); torch.add(i, i, alpha=c); i / c
"""


def written(i: torch.Tensor, c: int) -> torch.Tensor:
    i[0] = c
    return i


@pytest.mark.parametrize("dtype", (torch.int64, torch.uint8, torch.float32), ids=str)
def test_a_large_integer_does_what_it_does_on_the_cpu(dtype):
    host, cases = torch.tensor([1, 3, 2]).to(dtype), []
    for call in calls(FORMS):
        for c in CONSTANTS:
            # torch takes one bound beyond 64 bits, and refuses it beside another
            more = {"c": c, "long_c": min(abs(c), 2**63 - 1), "written": written}
            found = [outcome(call, d, i=host.to(d), **more) for d in ("cpu", "jax")]
            cases.append((f"{call} where c = {c}", *found))
    xs.sync()
    for name, want, got in cases:
        if isinstance(want, Exception) or isinstance(got, Exception):
            assert type(want) is type(got), name
        else:
            assert got.dtype == want.dtype, name
            torch.testing.assert_close(
                got.cpu(), want, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_an_element_whose_number_takes_more_than_32_bits_is_read():
    x = torch.zeros(2**31 + 5, dtype=torch.int8, device="jax")
    x[-2] = 3
    assert x[-2].item() == x[2**31 + 3].item() == 3 and x[-3:].tolist() == [0, 3, 0]
