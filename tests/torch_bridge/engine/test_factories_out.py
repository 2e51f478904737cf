"""Functions that make tensors, with `out=`: values, shapes, dtypes and warnings as on the CPU."""

from __future__ import annotations

import warnings

import pytest
import torch

import isoshard.torch_bridge  # noqa: F401

FACTORIES = {
    "full": lambda out: torch.full((2, 3), 2.5, out=out),
    "full, whole": lambda out: torch.full((2, 3), 2, out=out),
    "zeros": lambda out: torch.zeros(2, 3, out=out),
    "ones": lambda out: torch.ones(2, 3, out=out),
    "eye": lambda out: torch.eye(2, 3, out=out),
    "arange": lambda out: torch.arange(6, out=out),
    "arange, floats": lambda out: torch.arange(0.5, 6, out=out),
    "arange, a dtype": lambda out: torch.arange(0, 6, 1, dtype=torch.float32, out=out),
    "linspace": lambda out: torch.linspace(0, 5, 6, out=out),
    "logspace": lambda out: torch.logspace(0, 2, 6, base=2, out=out),
}
TARGETS = {
    "as it is": lambda device, dtype: torch.ones(2, 3, dtype=dtype, device=device),
    "flat": lambda device, dtype: torch.ones(6, dtype=dtype, device=device),
    "turned": lambda device, dtype: torch.ones(3, 2, dtype=dtype, device=device).t(),
    "nothing": lambda device, dtype: torch.ones(0, dtype=dtype, device=device),
    "large": lambda device, dtype: torch.ones(4, 5, dtype=dtype, device=device),
    "rows": lambda device, dtype: torch.ones(4, 3, dtype=dtype, device=device)[1:3],
}


def outcome(make, target, device, dtype):
    """What a call gives, or raises, and whether it warns of another size."""
    out = target(device, dtype)
    base = out if out._base is None else out._base
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            same = make(out) is out
        except RuntimeError:
            return "refused"
    resized = any("resized" in str(one.message) for one in caught)
    return same, out.tolist(), base.tolist(), out.shape, out.stride(), out.dtype, resized


@pytest.mark.parametrize("name", FACTORIES)
def test_out_is_as_on_the_cpu(name):
    """Every target, of every kind of number."""
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        for kind, target in TARGETS.items():
            expected = outcome(FACTORIES[name], target, "cpu", dtype)
            if expected == "refused" or "space" not in name:
                assert outcome(FACTORIES[name], target, "jax", dtype) == expected, (kind, dtype)
                continue
            got = outcome(FACTORIES[name], target, "jax", dtype)
            assert (got[0], *got[3:]) == (expected[0], *expected[3:]), (kind, dtype)
            torch.testing.assert_close(torch.tensor(got[1]), torch.tensor(expected[1]))


@pytest.mark.parametrize(
    "make",
    [
        lambda out: torch.rand(2, 3, out=out),
        lambda out: torch.randn(2, 3, out=out),
        lambda out: torch.randint(0, 5, (2, 3), out=out),
        lambda out: torch.randperm(6, out=out),
    ],
    ids=["rand", "randn", "randint", "randperm"],
)
def test_random_out_has_the_size_on_the_cpu(make):
    """Numbers differ; sizes, strides and warnings do not."""
    for kind, target in TARGETS.items():
        expected, got = (outcome(make, target, d, torch.float32) for d in ("cpu", "jax"))
        assert (got[0], *got[3:]) == (expected[0], *expected[3:]), kind


def test_drawing_into_another_size_warns_where_torch_does():
    out = torch.empty(3, 2, device="jax")
    with pytest.warns(UserWarning, match="resized"):
        torch.normal(torch.zeros(2, device="jax"), 1.0, out=out)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.normal(0.0, 1.0, (3,), out=torch.empty(5, device="jax"))
