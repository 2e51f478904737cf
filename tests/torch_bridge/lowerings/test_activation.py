"""Activations and softmax against CPU torch, with their kinks, infinities and half precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.torch_bridge.lowerings.harness import as_cpu, evaluate, together
from tests.torch_bridge.lowerings.samples import INF, NAN

aten = torch.ops.aten

# Every kink of every activation below, and both sides of it.
KINKS = torch.tensor(
    [-40.0, -6, -3.1, -3, -2.9, -1, -0.5, -0.4, -0.0, 0, 0.3, 0.5, 1, 1.5, 2.9, 3, 3.1, 6, 25, 90]
)
FUNCTIONS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "threshold": lambda x: F.threshold(x, 0.3, -7.0),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "hardtanh": lambda x: F.hardtanh(x, -1.0, 0.5),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "gelu": F.gelu,
    "tanh form of gelu": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "softplus": lambda x: F.softplus(x, 2.0, 10.0),
    "elu": lambda x: torch.ops.aten.elu(x, 0.7, 1.1, 1.3),
    "elu from its result": lambda x: F.elu(x * 1, 0.7, inplace=True),
    "celu": lambda x: F.celu(x, 0.7),
    "glu": lambda x: F.glu(x, 0),
    "log_sigmoid": F.logsigmoid,
    "prelu": lambda x: F.prelu(x, x.new_full((1,), 0.3)),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def test_activations_and_their_gradients_at_their_kinks():
    """Also in bfloat16, at NaN, and of nothing; integers stay integers."""
    cases = {name: (f, KINKS) for name, f in FUNCTIONS.items()}
    halves = [*FUNCTIONS.items()][::5]
    cases |= {f"{name} of halves": (f, KINKS.bfloat16()) for name, f in halves}
    special, nothing = torch.tensor([NAN, NAN]), torch.zeros(0, 2)
    unit = torch.tensor([-0.1, 0.1, 0.5, 0.9, 1.1])
    cases |= {f"logit {eps}": (lambda x, e=eps: torch.logit(x, e), unit) for eps in (None, 0.2)}
    for name, f in [*FUNCTIONS.items()][::2]:
        cases[f"{name} of NaN"] = (lambda x, f=f: f(x.detach()), special)
    cases["glu of nothing"] = FUNCTIONS["glu"], nothing
    for name in ("relu", "relu6", "hardtanh", "threshold"):
        whole = (int(n) for n in {"hardtanh": (-1, 5), "threshold": (3, -7)}.get(name, ()))
        function = getattr(F, name)
        cases[f"{name} of integers"] = (
            lambda x, f=function, n=(*whole,): f(x, *n),
            torch.arange(-3, 9),
        )
    as_cpu(cases, rtol=2e-5, atol=2e-5)


def test_gradients_at_the_ends():
    ends = torch.tensor([NAN, INF, -INF, 0.0, -0.0, -1.0, 1.0])
    with together() as check:
        check(aten._prelu_kernel_backward.default, torch.ones(7), ends, torch.full((7,), 0.5))
        check(aten.logit_backward.default, torch.ones(7), ends)
        check(aten.logit_backward.default, torch.ones(7), ends, 0.2)


def test_softmax_and_its_gradient():
    """A safe softmax of a row that is masked altogether is zero."""
    cases = {}
    for number, (x, dim) in enumerate(
        (
            (torch.randn(2, 3, 4), 1),
            (torch.randn(3, 5) * 300, -1),
            (torch.tensor(2.0), 0),
            (torch.zeros(0, 4), 1),
            (torch.zeros(4, 0), 1),
            (torch.tensor([[0.0, -INF, 1], [INF, 0, 0], [-INF, -INF, -INF]]), 1),
        )
    ):
        for function in (torch.softmax, torch.log_softmax, aten._safe_softmax):
            name = f"{function} {number}"
            cases[name] = (lambda x, f=function, dim=dim: f(x, dim), x)
            if number in (1, 4):
                cases[f"{name} of halves"] = (cases[name][0], x.bfloat16())
    as_cpu(cases)
    for name in ("_softmax", "_log_softmax"):
        x = torch.randn(3, 5).half()
        (got,) = evaluate(getattr(aten, name).default, x, 1, True)  # half to float
        want = getattr(torch, name.removeprefix("_"))(x.float(), 1)
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_tangents_of_glu():
    def both(t, d):
        loss = torch.func.grad(lambda t: F.glu(t).square().sum())
        return torch.func.jvp(loss, (t,), (d,))

    x, step = torch.randn(3, 4), torch.randn(3, 4)
    for want, got in zip(both(x, step), both(x.to("jax"), step.to("jax")), strict=True):
        torch.testing.assert_close(got.cpu(), want)
