"""Activations and softmax against CPU torch, with their kinks, infinities and half precision."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

from isoshard.torch_bridge.lowerings import registry
from tests.torch_bridge.lowerings.harness import check, evaluate

aten = torch.ops.aten
inf, nan = float("inf"), float("nan")
HALF = {"rtol": 2e-2, "atol": 2e-2}

# Every kink of every activation below, and both sides of it.
KINKS = torch.tensor(
    [-40.0, -6, -3.1, -3, -2.9, -1, -0.5, -0.4, -0.0, 0, 0.3, 0.5, 1, 1.5, 2.9, 3, 3.1, 6, 25, 90]
)
FORWARD = {
    "relu": (),
    "relu6": (),
    "threshold": (0.3, -7.0),
    "leaky_relu": (0.2,),
    "hardtanh": (-1.0, 0.5),
    "hardsigmoid": (),
    "hardswish": (),
    "hardshrink": (0.5,),
    "softshrink": (0.5,),
    "gelu": (),
    "silu": (),
    "mish": (),
    "softplus": (2.0, 10.0),
    "elu": (0.7, 1.1, 1.3),
    "celu": (0.7,),
    "glu": (0,),
    "log_sigmoid_forward": (),
}
BACKWARD = {
    "threshold_backward": (0.3,),
    "hardtanh_backward": (-1.0, 0.5),
    "hardsigmoid_backward": (),
    "hardswish_backward": (),
    "hardshrink_backward": (0.5,),
    "softshrink_backward": (0.5,),
    "leaky_relu_backward": (0.2, False),
    "gelu_backward": (),
    "silu_backward": (),
    "mish_backward": (),
    "softplus_backward": (2.0, 10.0),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward(name):
    check(getattr(aten, name).default, KINKS, *FORWARD[name])


@pytest.mark.parametrize("name", FORWARD)
def test_forward_in_bfloat16(name):
    check(getattr(aten, name).default, KINKS.bfloat16(), *FORWARD[name], **HALF)


@pytest.mark.parametrize("name", FORWARD)
def test_nan_and_empty(name):
    check(getattr(aten, name).default, torch.tensor([nan, nan]), *FORWARD[name])
    check(getattr(aten, name).default, torch.zeros(0, 2), *FORWARD[name])


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name):
    grad = torch.linspace(-1, 2, len(KINKS))
    check(getattr(aten, name).default, grad, KINKS, *BACKWARD[name])


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_in_bfloat16(name):
    grad = torch.linspace(-1, 2, len(KINKS)).bfloat16()
    check(getattr(aten, name).default, grad, KINKS.bfloat16(), *BACKWARD[name], **HALF)


@pytest.mark.parametrize("name", ["relu", "relu6", "hardtanh", "threshold"])
def test_integers_stay_integers(name):
    check(getattr(aten, name).default, torch.arange(-3, 9), *(int(x) for x in FORWARD[name]))


def test_tanh_form_of_gelu():
    check(aten.gelu.default, KINKS, approximate="tanh")
    check(aten.gelu_backward.default, torch.ones(len(KINKS)), KINKS, approximate="tanh")


@pytest.mark.parametrize("is_result", [False, True])
def test_elu_backward(is_result):
    saved = aten.elu(KINKS, 0.7, 1.1, 1.3) if is_result else KINKS
    check(aten.elu_backward.default, torch.ones(len(KINKS)), 0.7, 1.1, 1.3, is_result, saved)


@pytest.mark.parametrize("name", ["sigmoid_backward", "tanh_backward"])
def test_backward_from_the_result(name):
    result = torch.linspace(0, 1, 5)
    check(getattr(aten, name).default, torch.ones(5), result)


@pytest.mark.parametrize("eps", [None, 0.2])
def test_logit_backward(eps):
    check(aten.logit_backward.default, torch.ones(5), torch.tensor([-0.1, 0.1, 0.5, 0.9, 1.1]), eps)


def test_log_sigmoid_backward():
    _, buffer = aten.log_sigmoid_forward(KINKS)
    check(aten.log_sigmoid_backward.default, torch.ones(len(KINKS)), KINKS, buffer)


@pytest.mark.parametrize("dim", [0, -1])
def test_glu_backward(dim):
    x = torch.randn(4, 6)
    grad = torch.randn_like(torch.nn.functional.glu(x, dim))
    check(aten.glu_backward.default, grad, x, dim)


def test_prelu():
    weight = torch.linspace(0.1, 0.4, len(KINKS))
    check(aten._prelu_kernel.default, KINKS, weight)
    check(aten._prelu_kernel_backward.default, torch.ones(len(KINKS)), KINKS, weight)


def test_rrelu_draws_slopes_within_bounds():
    function = registry.find(aten.rrelu_with_noise.default).function
    x = jax.numpy.array([-1.0] * 100 + [2.0] * 100)
    y, noise = function(jax.random.key(0), x, x, 0.1, 0.3, True)
    assert ((noise[:100] >= 0.1) & (noise[:100] < 0.3)).all()
    assert np.unique(noise[:100]).size > 50
    np.testing.assert_array_equal(noise[100:], 1)
    np.testing.assert_allclose(y, x * noise)
    np.testing.assert_allclose(function(jax.random.key(0), x, x, 0.1, 0.3)[0][:100], -0.2)


SOFTMAX_CASES = [
    (torch.randn(3, 5), 1),
    (torch.randn(2, 3, 4), 1),
    (torch.randn(3, 5) * 300, -1),
    (torch.tensor(2.0), 0),
    (torch.zeros(0, 4), 1),
    (torch.zeros(4, 0), 1),
    (torch.zeros(4, 0), 0),
    (torch.tensor([[0.0, -inf, 1], [inf, 0, 0], [-inf, -inf, -inf]]), 1),
]


@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
@pytest.mark.parametrize(("x", "dim"), SOFTMAX_CASES)
def test_softmax(name, x, dim):
    op, backward = (getattr(aten, n).default for n in (name, f"{name}_backward_data"))
    check(op, x, dim, False)
    check(op, x.bfloat16(), dim, False, **HALF)
    result = op(x, dim, False)
    check(backward, torch.randn_like(result), result, dim, x.dtype)


@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
def test_softmax_of_half_to_float(name):
    x = torch.randn(3, 5).half()
    (got,) = evaluate(getattr(aten, name).default, x, 1, True)
    want = getattr(torch, name.removeprefix("_"))(x.float(), 1)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize(("x", "dim"), SOFTMAX_CASES)
def test_safe_softmax_of_a_masked_row_is_zero(x, dim):
    check(aten._safe_softmax.default, x, dim)


def test_gradients_at_nan_and_at_the_ends():
    x = torch.tensor([nan, inf, -inf, 0.0, -0.0, -1.0, 1.0])
    ones = torch.ones_like(x)
    check(aten._prelu_kernel_backward.default, ones, x, ones / 2)
    check(aten.logit_backward.default, ones, x)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_tangents_of_glu():
    x, step = torch.randn(3, 4), torch.randn(3, 4)
    found = [
        torch.func.jvp(
            torch.func.grad(lambda t: torch.nn.functional.glu(t).square().sum()), (t,), (d,)
        )
        for t, d in ((x, step), (x.to("jax"), step.to("jax")))
    ]
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got.cpu(), want)
