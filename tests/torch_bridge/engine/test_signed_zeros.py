"""0.0 and -0.0 are two constants: whichever was seen first, the other keeps its sign."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs

ZEROS = (0.0, -0.0)
FORMS = {
    "div": lambda x, s: x / s,
    "rdiv": lambda x, s: s / x,
    "mul": lambda x, s: x * s,
    "true_divide of integers": lambda x, s: torch.true_divide(x.to(torch.int64), s),
    "floor_divide": lambda x, s: torch.floor_divide(x, s),
    "copysign": torch.copysign,
    "full": lambda x, s: torch.full((2,), s, device=x.device),
    "full_like": torch.full_like,
    "fill_": lambda x, s: x.clone().fill_(s),
    "tensor": lambda x, s: torch.tensor([s, 1.0], device=x.device),
    "scalar_tensor": lambda x, s: torch.scalar_tensor(s, device=x.device),
    "masked_fill": lambda x, s: x.masked_fill(x > 0, s),
    "where": lambda x, s: torch.where(x > 0, s, x),
    "setitem": lambda x, s: _set(x, s),
    "addcdiv": lambda x, s: torch.addcdiv(-x * 0, x, x, value=s),
    "add alpha": lambda x, s: torch.add(-x * 0 * x.sign(), x, alpha=s),
    "lerp": lambda x, s: torch.lerp(-x * 0 * x.sign(), x, s),
    "pad": lambda x, s: torch.nn.functional.pad(x, (1, 1), value=s),
    "atan2": lambda x, s: torch.atan2(torch.full_like(x, s), x),
    "pow": lambda x, s: torch.full_like(x, s).pow(-1),
    "leaky_relu": lambda x, s: torch.nn.functional.leaky_relu(x, s),
    "threshold": lambda x, s: torch.nn.functional.threshold(x, 0.5, s),
    "nan_to_num": lambda x, s: (x / 0 * 0).nan_to_num(s),
    "complex": lambda x, s: torch.view_as_real(torch.full((2,), complex(1, s), device=x.device)),
    "constant of complex": lambda x, s: torch.complex(x, x * s).angle(),
    "baddbmm": lambda x, s: torch.baddbmm(x.view(1, 1, 2), x.view(1, 1, 2), x.diag()[None], beta=s),
    "foreach": lambda x, s: torch._foreach_mul([x], s)[0],
    "foreach list": lambda x, s: torch._foreach_mul([x, x], [s, 1.0])[0],
}


def _set(x: torch.Tensor, s: float) -> torch.Tensor:
    y = x.clone()
    y[0] = s
    return y


def shows(value: torch.Tensor) -> list[tuple[float, bool]]:
    flat = value.detach().cpu().flatten()
    signs = flat.signbit().tolist()
    return [
        (0.0 if math.isnan(v) else v, False if math.isnan(v) else bool(s))
        for v, s in zip(flat.tolist(), signs, strict=True)
    ]


@pytest.mark.parametrize("order", [ZEROS, ZEROS[::-1]], ids=["plus first", "minus first"])
@pytest.mark.parametrize("form", FORMS)
def test_an_operation_keeps_the_sign_of_a_zero(form, order):
    x = torch.tensor([1.0, -2.0])
    one = FORMS[form]
    for zero in (*order, *order):
        assert shows(one(x.to("jax"), zero)) == shows(one(x, zero)), zero


@pytest.mark.parametrize("order", [ZEROS, ZEROS[::-1]], ids=["plus first", "minus first"])
def test_a_captured_step_keeps_the_sign_of_an_argument(order):
    step = xs.compile(lambda x, s: 1 / (x * s))
    nested = xs.compile(lambda x, s: 1 / (x * s["scale"][0]))
    x = torch.tensor([1.0, -2.0])
    for zero in (*order, *order):
        want = (1 / (x * zero)).tolist()
        assert step(x.to("jax"), zero).tolist() == want
        assert nested(x.to("jax"), {"scale": [zero]}).tolist() == want


@pytest.mark.parametrize("zero", [0.0, np.float64(0), np.float32(0), complex(0, 0)], ids=repr)
def test_a_function_of_jax_keeps_the_sign_of_a_constant(zero):
    def divided(x, s):
        return jnp.asarray(1 / (x * jnp.asarray(s).real)).astype(jnp.float32)

    taken = iso.torch_function(divided)
    given = iso.jax_function(lambda x, s: 1 / (x * float(np.real(s))))
    x = torch.tensor([1.0, -2.0])
    for one in (zero, -zero, zero, -zero):
        want = (1 / (x * float(np.real(one)))).tolist()
        assert taken(x.to("jax"), one).tolist() == want
        assert np.asarray(given(x.numpy(), one)).tolist() == want


def test_a_constant_captured_by_a_step_keeps_its_sign():
    class Box:
        scale = 0.0

    box = Box()
    step = xs.compile(lambda x: 1 / (x * box.scale))
    x = torch.tensor([1.0, -2.0])
    for box.scale in (0.0, -0.0, 0.0, -0.0):
        assert step(x.to("jax")).tolist() == (1 / (x * box.scale)).tolist()
