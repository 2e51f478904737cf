"""`jax.grad` of a torch function is torch's gradient, at awkward points too.

Points are zeros, ties, edges of activations and halves; functions are given as text, so that
each is one line. All gradients are one compiled program. What fails is in
`known_faults.py`, all of it.
"""

from __future__ import annotations

import contextlib

import jax
import numpy as np
import torch
from torch.nn import functional

import isoshard as iso

from .known_faults import DERIVATIVES

POINTS = {
    "zeros": [0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    "ties": [1.0, 1.0, -2.0, -2.0, 1.0, -2.0],
    "edges": [-1.0, 0.0, 1.0, 3.0, -3.0, 6.0],
    "halves": [0.5, -0.5, 1.5, 2.5, -1.5, 0.25],
    "others": [0.3, -1.7, 2.2, 0.9, -0.4, 1.1],
    "one zero": [0.0, 2.0, -1.5, 0.7, 0.4, -0.2],
}

ELEMENTWISE = (
    "torch.relu(v)", "F.relu6(v)", "F.hardtanh(v)", "F.leaky_relu(v)", "F.elu(v)", "F.selu(v)",
    "F.celu(v)", "F.softplus(v)", "F.gelu(v)", "F.silu(v)", "F.mish(v)", "F.hardswish(v)",
    "F.hardsigmoid(v)", "F.softshrink(v)", "F.hardshrink(v)", "F.threshold(v, 1.0, 0.0)",
    "F.logsigmoid(v)", "F.tanhshrink(v)", "F.softsign(v)", "F.prelu(v, v[:1].detach())",
    "v.abs()", "v.sign()", "v ** 2", "v ** 3", "v ** 0", "v ** 1.0", "v.abs() ** 0.5",
    "v.abs().sqrt()", "v.clamp(-1, 1)", "v.clamp(min=0)", "v.clamp(max=1)", "v.round() * v",
    "v.floor() * v", "v.trunc() + v", "torch.exp(v)", "torch.expm1(v)", "torch.log1p(v.abs())",
    "torch.sinc(v)", "torch.tanh(v)", "torch.sigmoid(v)", "torch.erf(v)", "torch.nan_to_num(v)",
    "torch.where(v > 0, v, v * 0.1)", "torch.where(v == 0, torch.zeros_like(v), 1 / v)",
)  # fmt: skip
PAIRS = (
    "torch.maximum(v, w)", "torch.minimum(v, w)", "torch.fmax(v, w)", "torch.fmin(v, w)",
    "torch.copysign(v, w)", "torch.hypot(v, w)", "torch.atan2(v, w)", "torch.xlogy(v, w.abs())",
    "torch.fmod(v, 1.5)", "torch.remainder(v, 1.5)", "F.l1_loss(v, w)", "F.smooth_l1_loss(v, w)",
    "F.huber_loss(v, w)", "F.mse_loss(v, w)", "(v - w).abs()", "torch.dist(v, w)",
    "F.cosine_similarity(v, w, dim=0)", "F.pairwise_distance(v[None], w[None])",
    "torch.cdist(v.view(3, 2), w.view(3, 2))", "torch.logaddexp(v, w)", "v.abs() ** w",
)  # fmt: skip
REDUCTIONS = (
    "v.norm()", "v.norm(1)", "v.norm(3)", "v.norm(float('inf'))", "v.view(3, 2).norm(dim=1)",
    "torch.linalg.vector_norm(v)", "F.normalize(v, dim=0)", "v.max()", "v.min()", "v.amax()",
    "v.amin(0)", "v.view(3, 2).max(dim=1).values", "v.view(3, 2).min(dim=0).values", "v.median()",
    "v.std()", "v.var()", "v.prod()", "v.cumprod(0)", "v.cumsum(0)", "v.logsumexp(0)",
    "v.softmax(0)", "v.log_softmax(0)", "v.sort().values * torch.arange(6.0)", "v.cummax(0).values",
    "v.topk(2).values", "v.kthvalue(3).values", "v.mean() * v", "v.aminmax().max",
    "F.layer_norm(v, (6,))", "F.max_pool1d(v[None, None], 2)", "v.logcumsumexp(0)",
    "torch.zeros(3).scatter_reduce(0, torch.tensor([0, 0, 1, 1, 2, 2]), v, 'prod')",
    "torch.zeros(3).scatter_reduce(0, torch.tensor([0, 0, 1, 1, 2, 2]), v, 'amax')",
    "torch.zeros(3).index_add(0, torch.tensor([0, 0, 1, 1, 2, 2]), v)",
)  # fmt: skip
STOPPED = (
    "v * v.detach()", "v * v.data", "v + (v.round() - v).detach()", "v / v.detach().abs().max()",
    "v * without(v)", "v * decorated(v)", "hooked(v * 2)", "v * frozen(v)", "straight(v) * v",
    "F.embedding(torch.tensor([0, 2, 0]), v.view(3, 2), padding_idx=0)",
    "F.embedding(torch.tensor([0, 2, 0]), v.view(3, 2), scale_grad_by_freq=True)",
    "F.embedding_bag(torch.tensor([[0, 2]]), v.view(3, 2), padding_idx=0, mode='sum')",
    "v * v.clone().detach_()", "v * v.new_tensor(2.0)",
    "v * (3 if torch.is_grad_enabled() else 2)", "v * (3 if v.requires_grad else 2)",
)  # fmt: skip


def without(v):
    """Of code that runs with gradients off."""
    with torch.no_grad():
        return v * 3


@torch.no_grad()
def decorated(v):
    """As `without`."""
    return v * v


def hooked(v):
    """Of a tensor whose gradient a hook changes."""
    if v.requires_grad:
        v.register_hook(lambda gradient: gradient * 10)
    return v


def frozen(v):
    """Of a layer whose result is a target."""
    with torch.inference_mode():
        target = v * 2
    return target.clone()


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(context, v):
        return v.sign()

    @staticmethod
    def backward(context, gradient):
        return gradient.clamp(-1, 1)


straight = _Straight.apply

KNOWN = {line for lines in DERIVATIVES.values() for line in lines}
EVERY = (*ELEMENTWISE, *PAIRS, *REDUCTIONS, *STOPPED)


def scalar(line):
    """The function of a line: its results are weighed and added."""
    code = compile(line, "<line>", "eval")
    names = globals() | {"F": functional}

    def function(v, w):
        result = eval(code, names, {"v": v, "w": w})
        weights = torch.linspace(1, 2, result.numel()).reshape(result.shape)
        return (result * weights).sum()

    return function


def wanted(line, point):
    """torch's own gradient."""
    v, w = torch.tensor(point, requires_grad=True), torch.tensor(point).flip(0)
    scalar(line)(v, w).backward()
    return v.grad.numpy()


def test_gradients_are_those_of_torch():
    lines = [line for line in EVERY if "aminmax" not in line or torch.__version__ >= "2.13"]
    points = np.array(list(POINTS.values()), np.float32)

    def gradients(v, w):
        found = {}
        for line in lines:
            with contextlib.suppress(NotImplementedError):  # JAX's, of the product's scatter
                found[line] = jax.vmap(jax.grad(iso.jax_function(scalar(line))))(v, w)
        return found

    found = jax.device_get(jax.jit(gradients)(points, points[:, ::-1]))
    wrong = {}
    for line in lines:
        for name, one in zip(POINTS, found.get(line, [None] * len(POINTS)), strict=True):
            want = wanted(line, POINTS[name])
            if one is None or not np.allclose(one, want, 1e-4, 1e-5, equal_nan=True):
                wrong.setdefault(line, {})[name] = one, want
    assert wrong.keys() == KNOWN, wrong
