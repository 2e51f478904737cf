"""Constants of operations: values that code can tell apart are apart, and others are not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import isoshard as iso
import isoshard.torch_bridge as xs

OPERATIONS = {
    "copysign": torch.copysign,
    "full": lambda x, v: 1 / torch.full((2,), v, device=x.device),
    "full_like": lambda x, v: 1 / torch.full_like(x, v),
    "tensor": lambda x, v: 1 / torch.tensor([v], device=x.device),
    "mul": lambda x, v: 1 / (x * v),
    "rmul": lambda x, v: 1 / torch.mul(v, x.abs()),
    "div": lambda x, v: torch.div(v, x).sign() / v,
    "pow": lambda x, v: 1 / torch.pow(v, x.abs() * 0 + 3),
    "clamp": lambda x, v: 1 / torch.clamp(x, min=v, max=v),
    "hardtanh": lambda x, v: 1 / F.hardtanh(x, v, v),
    "threshold": lambda x, v: 1 / torch.threshold(x, 5.0, v),
    "where": lambda x, v: 1 / torch.where(x > 0, v, v),
    "fill": lambda x, v: 1 / x.clone().fill_(v),
    "masked_fill": lambda x, v: 1 / x.masked_fill(x > 0, v),
    "pad": lambda x, v: 1 / F.pad(x, (1, 1), value=v),
    "nan_to_num": lambda x, v: 1 / torch.nan_to_num(x * math.nan, nan=v),
    "complex": lambda x, v: torch.angle(x * complex(0, v)),
}


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.cpu(), want, equal_nan=True)


@pytest.mark.parametrize("name", OPERATIONS)
def test_zero_is_not_minus_zero(name):
    x = torch.tensor([1.0, -2.0])
    for value in (0.0, -0.0, 0.0):
        same(OPERATIONS[name](x.to("jax"), value), OPERATIONS[name](x, value))


def test_minus_zero_as_an_argument_of_functions():
    x = torch.tensor([1.0, -2.0])
    by_jax = iso.torch_function(lambda x, v: 1 / (x * v))
    for value in (0.0, -0.0):
        same(by_jax(x.to("jax"), value), 1 / (x * value))


def test_one_nan_is_another(counted):
    x = torch.ones(3, device="jax")

    def compiled() -> Any:
        xs.sync()
        return counted("compilations")

    F.pad(x, (1, 1), value=float("nan"))
    first = compiled()
    for _ in range(3):
        assert F.pad(x, (1, 1), value=float("nan")).isnan().sum().item() == 2
    again = compiled()
    assert again - first <= 1  # the sum
