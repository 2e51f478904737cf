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
@pytest.mark.parametrize("name", ROUNDED_ONCE)
def test_one_rounding(name, dtype):
    function, x = ROUNDED_ONCE[name], X.to(dtype)
    torch.testing.assert_close(
        function(x.to("jax")).cpu(),
        function(x.float()).to(dtype),
        rtol=torch.finfo(dtype).eps,
        atol=1e-6,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", AS_ON_THE_CPU)
def test_numbers_that_torch_rounds(name, dtype):
    """torch rounds these numbers to the dtype of the tensor before it computes."""
    function, x = AS_ON_THE_CPU[name], X.to(dtype)
    want, got = function(x), function(x.to("jax")).cpu()
    torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["sum", "prod", "mean", "nansum"])
def test_halves_named_as_dtype_are_reduced_as_floats(name, dtype):
    """JAX adds and multiplies them in 16 bits where the dtype is named."""
    x = torch.randn(64, 65, generator=torch.Generator().manual_seed(0)) / 8 + 1
    x[:, -1] = -x[:, :-1].sum(1) + 1 if name != "prod" else 1
    want = getattr(x.to(dtype).double(), name)(1)
    for given in (x, x.to(dtype)):
        got = getattr(given.to("jax"), name)(1, dtype=dtype)
        assert got.dtype == dtype
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(got.cpu().double(), want, rtol=0.51 * eps, atol=1e-5)
