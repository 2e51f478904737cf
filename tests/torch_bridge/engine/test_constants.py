"""Constants of operations: values that code can tell apart are apart, and others are not."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import isoshard as iso
import isoshard.torch_bridge as xs
from tests.torch_bridge.engine.spelled_calls import calls, outcome

ZEROS = (0.0, -0.0)
FORMS = """
    x / s; s / x; x * s; torch.mul(s, x.abs()); torch.true_divide(x.to(torch.int64), s)
    torch.floor_divide(x, s); torch.copysign(x, s); torch.full((2,), s, device=d)
    torch.full_like(x, s); x.clone().fill_(s); torch.tensor([s, 1.0], device=d)
    torch.scalar_tensor(s, device=d); x.masked_fill(x > 0, s); torch.where(x > 0, s, x)
    written(x.clone(), s); torch.addcdiv(-x * 0, x, x, value=s)
    torch.add(-x * 0 * x.sign(), x, alpha=s); torch.lerp(-x * 0 * x.sign(), x, s)
    F.pad(x, (1, 1), value=s); torch.clamp(x, min=s, max=s); F.hardtanh(x, s, s)
    torch.atan2(torch.full_like(x, s), x); torch.full_like(x, s).pow(-1)
    torch.pow(s, x.abs() * 0 + 3); F.leaky_relu(x, s); F.threshold(x, 5.0, s)
    (x / 0 * 0).nan_to_num(s); torch.view_as_real(torch.full((2,), complex(1, s), device=d))
    torch.complex(x, x * s).angle(); torch.angle(x * complex(0, s))
    torch.baddbmm(x.view(1, 1, 2), x.view(1, 1, 2), x.diag()[None], beta=s)
    torch._foreach_mul([x], s)[0]; torch._foreach_mul([x, x], [s, 1.0])[0]
"""


def written(x: torch.Tensor, s: float) -> torch.Tensor:
    x[0] = s
    return x


def shows(value: torch.Tensor) -> list[tuple[float, bool]]:
    """Numbers and their signs; NaN has none."""
    flat = value.detach().cpu().flatten()
    pairs = zip(flat.tolist(), flat.signbit().tolist(), strict=True)
    return [(0.0, False) if math.isnan(v) else (v, bool(s)) for v, s in pairs]


@pytest.mark.parametrize("order", [ZEROS, ZEROS[::-1]], ids=["plus first", "minus first"])
def test_an_operation_keeps_the_sign_of_a_zero(order):
    """Whichever zero was seen first, the other keeps its sign."""
    x = torch.tensor([1.0, -2.0])
    for zero in (*order, *order):
        wants, gots = (
            [outcome(form, d, x=x.to(d), s=zero, written=written) for form in calls(FORMS)]
            for d in ("cpu", "jax")
        )
        xs.sync()
        for form, want, got in zip(calls(FORMS), wants, gots, strict=True):
            assert shows(got) == shows(want), (form, zero)


@pytest.mark.parametrize("order", [ZEROS, ZEROS[::-1]], ids=["plus first", "minus first"])
def test_a_captured_step_keeps_the_sign_of_an_argument_and_of_what_it_reads(order):
    class Box:
        scale = 0.0

    box = Box()
    step = xs.compile(lambda x, s: 1 / (x * s))
    nested = xs.compile(lambda x, s: 1 / (x * s["scale"][0]))
    reads = xs.compile(lambda x: 1 / (x * box.scale))
    x = torch.tensor([1.0, -2.0])
    for zero in (*order, *order):
        want = (1 / (x * zero)).tolist()
        box.scale = zero
        assert step(x.to("jax"), zero).tolist() == want
        assert nested(x.to("jax"), {"scale": [zero]}).tolist() == want
        assert reads(x.to("jax")).tolist() == want


def test_a_function_of_jax_keeps_the_sign_of_a_constant():
    def divided(x, s):
        return jnp.asarray(1 / (x * jnp.asarray(s).real)).astype(jnp.float32)

    taken = iso.torch_function(divided)
    given = iso.jax_function(lambda x, s: 1 / (x * float(np.real(s))))
    x = torch.tensor([1.0, -2.0])
    for zero in (0.0, np.float64(0), np.float32(0), complex(0, 0)):
        for one in (zero, -zero, zero):
            want = (1 / (x * float(np.real(one)))).tolist()
            assert taken(x.to("jax"), one).tolist() == want
            assert np.asarray(given(x.numpy(), one)).tolist() == want


def test_one_nan_is_another(counted):
    x = torch.ones(3, device="jax")
    F.pad(x, (1, 1), value=float("nan"))
    xs.sync()
    first = counted("compilations")
    for _ in range(3):
        assert F.pad(x, (1, 1), value=float("nan")).isnan().sum().item() == 2
    assert counted("compilations") - first <= 1  # the sum
