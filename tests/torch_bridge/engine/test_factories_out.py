"""Functions that make tensors, with `out=`: values, shapes, dtypes and warnings as on the CPU."""

from __future__ import annotations

import warnings

import pytest
import torch

import isoshard.torch_bridge as xs
from tests.torch_bridge.engine.spelled_calls import calls

FACTORIES = """
    torch.full((2, 3), 2.5, out=out); torch.full((2, 3), 2, out=out); torch.zeros(2, 3, out=out)
    torch.ones(2, 3, out=out); torch.eye(2, 3, out=out); torch.arange(6, out=out)
    torch.arange(0.5, 6, out=out); torch.arange(0, 6, 1, dtype=torch.float32, out=out)
    torch.linspace(0, 5, 6, out=out); torch.logspace(0, 2, 6, base=2, out=out)
"""
DRAWS = """
    torch.rand(2, 3, out=out); torch.randn(2, 3, out=out); torch.randint(0, 5, (2, 3), out=out)
    torch.randperm(6, out=out)
"""
TARGETS = {
    "as it is": lambda device, dtype: torch.ones(2, 3, dtype=dtype, device=device),
    "flat": lambda device, dtype: torch.ones(6, dtype=dtype, device=device),
    "turned": lambda device, dtype: torch.ones(3, 2, dtype=dtype, device=device).t(),
    "nothing": lambda device, dtype: torch.ones(0, dtype=dtype, device=device),
    "large": lambda device, dtype: torch.ones(4, 5, dtype=dtype, device=device),
    "rows": lambda device, dtype: torch.ones(4, 3, dtype=dtype, device=device)[1:3],
}


def outcome(call, target, device, dtype):
    """What a call gives, or raises, and whether it warns of another size; then the numbers."""
    out = target(device, dtype)
    base = out if out._base is None else out._base
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            same = eval(call, {"torch": torch, "out": out}) is out
        except RuntimeError:
            return "refused", []
    resized = any("resized" in str(one.message) for one in caught)
    return (same, out.shape, out.stride(), out.dtype, resized), [out.clone(), base.clone()]


DTYPES = (torch.bfloat16, torch.int64, torch.bool, torch.complex64)


@pytest.mark.parametrize(("number", "call"), list(enumerate(calls(FACTORIES + DRAWS))))
def test_out_is_as_on_the_cpu(number, call):
    """Every target, in float32 and two more dtypes; of those that draw, numbers differ."""
    dtypes = (torch.float32, DTYPES[number % 4], DTYPES[(number + 1 + number // 4) % 4])
    cases = [(dtype, kind) for dtype in dtypes for kind in TARGETS]
    wants, gots = (
        [outcome(call, TARGETS[kind], device, dtype) for dtype, kind in cases]
        for device in ("cpu", "jax")
    )
    if call not in DRAWS:
        xs.sync()
    exact = 0 if "space" not in call else None
    for case, want, got in zip(cases, wants, gots, strict=True):
        assert got[0] == want[0], case
        for one, other in zip(got[1], want[1], strict=True) if call not in DRAWS else ():
            torch.testing.assert_close(
                one.cpu(), other, rtol=exact, atol=exact, msg=lambda text, c=case: f"{c}: {text}"
            )


def test_drawing_into_another_size_warns_where_torch_does():
    out = torch.empty(3, 2, device="jax")
    with pytest.warns(UserWarning, match="resized"):
        torch.normal(torch.zeros(2, device="jax"), 1.0, out=out)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.normal(0.0, 1.0, (3,), out=torch.empty(5, device="jax"))
