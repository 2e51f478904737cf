"""Half precision: numbers stay float32 and results are rounded once, as torch computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import isoshard.torch_bridge  # noqa: F401  (registers the device)

X = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 3
ROUNDED_ONCE = {
    "add": lambda x: x + 0.1,
    "subtract": lambda x: x - 0.1,
    "subtract from": lambda x: 1.1 - x,
    "multiply": lambda x: x * 0.1,
    "divide": lambda x: x / 0.3,
    "add a multiple": lambda x: torch.add(x, x.flip(0), alpha=0.1),
    "addcmul": lambda x: torch.addcmul(x, x.flip(0), x, value=0.1),
    "lerp": lambda x: torch.lerp(x, x.flip(0), 0.3),
    "foreach": lambda x: torch._foreach_add([x], 0.1)[0],
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "softshrink": lambda x: F.softshrink(x, 0.3),
}
# torch rounds these numbers to the dtype of the tensor before it computes.
AS_ON_THE_CPU = {
    "compare": lambda x: x > 0.1,
    "clamp": lambda x: x.clamp(-0.3, 0.7),
    "remainder": lambda x: torch.remainder(x, 0.3),
    "fmod": lambda x: torch.fmod(x, 0.3),
    "power": lambda x: x.abs() ** 1.3,
    "power of a number": lambda x: 1.7**x,
    "floor_divide": lambda x: x // 0.3,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_beside_halves(dtype):
    x = X.to(dtype)
    there = x.to("jax")
    pairs = [(n, f(there), f(x.float()).to(dtype)) for n, f in ROUNDED_ONCE.items()]
    pairs += [(n, f(there), f(x)) for n, f in AS_ON_THE_CPU.items()]
    for name, got, want in pairs:
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(got.cpu(), want, rtol=eps, atol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_named_as_dtype_are_reduced_as_floats(dtype):
    """JAX adds and multiplies them in 16 bits where the dtype is named."""
    pairs = []
    for name in ("sum", "prod", "mean", "nansum"):
        x = torch.randn(64, 65, generator=torch.Generator().manual_seed(0)) / 8 + 1
        x[:, -1] = -x[:, :-1].sum(1) + 1 if name != "prod" else 1
        want = getattr(x.to(dtype).double(), name)(1)
        for given in (x, x.to(dtype)):
            pairs.append((getattr(given.to("jax"), name)(1, dtype=dtype), want))
    for got, want in pairs:
        assert got.dtype == dtype
        rtol = 0.51 * torch.finfo(dtype).eps
        torch.testing.assert_close(got.cpu().double(), want, rtol=rtol, atol=1e-5)
