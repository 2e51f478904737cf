"""Differentiable forms of torch at awkward points: one list, for every way to differentiate.

A form is text, an expression of `v` and `w` with six elements each; it is written so that it runs
on any device and in any floating dtype. Its results are weighed and added, so each has a gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

inf, nan = float("inf"), float("nan")

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
    "F.celu(v)", "F.softplus(v)", "F.gelu(v)", "F.gelu(v, approximate='tanh')", "F.silu(v)",
    "F.mish(v)", "F.hardswish(v)", "F.hardsigmoid(v)", "F.softshrink(v)", "F.hardshrink(v)",
    "F.threshold(v, 1.0, 0.0)", "F.logsigmoid(v)", "F.tanhshrink(v)", "F.softsign(v)", "v.abs()",
    "v.sign()", "v ** 2", "v ** 3", "v ** 0", "v ** 1.0", "v.abs() ** 0.5", "v.abs().sqrt()",
    "v.clamp(-1, 1)", "v.clamp(min=0)", "v.clamp(max=1)", "v.round() * v", "v.floor() * v",
    "v.trunc() + v", "torch.exp(v)", "torch.expm1(v)", "torch.log1p(v.abs())", "torch.sinc(v)",
    "torch.tanh(v)", "torch.sigmoid(v)", "torch.erf(v)", "torch.nan_to_num(v)", "v.rsqrt()",
    "torch.where(v > 0, v, v * 0.1)", "torch.where(v == 0, torch.zeros_like(v), 1 / v)",
    "torch.where(v > 0, v.sqrt(), v * 0)", "torch.where(v > 0, v.log(), v)", "v.reciprocal()",
    "torch.asin(v.clamp(-1, 1))", "torch.acosh(v.abs() + 1)", "torch.special.xlog1py(v, v.abs())",
    "torch.special.entr(v.abs())", "torch.frac(v) * v", "v.square().sqrt()", "torch.logit(v, 0.1)",
    "torch.special.i0(v)", "v.masked_fill(v > 0, -inf).exp()", "F.relu(v).sqrt()",
    "torch.digamma(v.abs() + 1)", "torch.pow(2, v)", "torch.pow(0, v.abs())", "-v.neg().abs()",
)  # fmt: skip
PAIRS = (
    "torch.maximum(v, w)", "torch.minimum(v, w)", "torch.fmax(v, w)", "torch.fmin(v, w)",
    "torch.copysign(v, w)", "torch.hypot(v, w)", "torch.atan2(v, w)", "torch.xlogy(v, w.abs())",
    "torch.xlogy(w, v.abs())", "torch.fmod(v, 1.5)", "torch.remainder(v, 1.5)", "(v - w).abs()",
    "torch.logaddexp(v, w)", "torch.logaddexp2(v, w)", "v.abs() ** w", "w.abs() ** v", "v / w",
    "torch.clamp(v, w, w + 1)", "torch.lerp(v, w, v)", "F.prelu(v, v[:1].detach())",
    "torch.where(v > w, v, w)", "torch.float_power(v, w.abs()).to(v.dtype)",
    "torch.ldexp(v, w.sign())",
)  # fmt: skip
LOSSES = (
    "F.l1_loss(v, w)", "F.smooth_l1_loss(v, w)", "F.smooth_l1_loss(v, w, beta=0.0)",
    "F.huber_loss(v, w)", "F.huber_loss(v, w - 1)", "F.mse_loss(v, w)", "torch.dist(v, w)",
    "F.hinge_embedding_loss(v, ones(v))", "F.hinge_embedding_loss(v, -ones(v))",
    "F.margin_ranking_loss(v, w, ones(v))", "F.soft_margin_loss(v, ones(v))",
    "F.multi_margin_loss(v.view(3, 2), ids(v, 0, 1, 0))", "F.kl_div(v, w.abs(), reduction='sum')",
    "F.multilabel_margin_loss(v.view(3, 2), ids(v, 0, -1, 1, 0, 0, 1).view(3, 2))",
    "F.binary_cross_entropy(v.abs().clamp(0, 1), w.abs().clamp(0, 1))",
    "F.binary_cross_entropy_with_logits(v, w.abs().clamp(0, 1))", "F.poisson_nll_loss(v, w)",
    "F.cosine_similarity(v, w, dim=0)",
    "F.pairwise_distance(v[None], w[None])", "torch.cdist(v.view(3, 2), w.view(3, 2))",
    "torch.cdist(v.view(3, 2), v.view(3, 2))", "torch.cdist(v.view(3, 2), w.view(3, 2), p=1)",
    "F.pdist(v.view(3, 2))", "F.cosine_embedding_loss(v.view(3, 2), w.view(3, 2), ones(v)[:3])",
    "F.triplet_margin_loss(v.view(3, 2), w.view(3, 2), v.view(3, 2) * 0)",
    "F.cross_entropy(v.view(3, 2), ids(v, 0, 1, -100))",
    "F.nll_loss(v.view(3, 2).log_softmax(1), ids(v, 0, 1, 1), reduction='none')",
    "F.ctc_loss(v.view(3, 1, 2).log_softmax(2), ids(v, 1).view(1, 1), (3,), (1,))",
    "F.ctc_loss(v.view(2, 1, 3).log_softmax(2), ids(v, 1, 1).view(1, 2), (2,), (2,))",
)  # fmt: skip
REDUCTIONS = (
    "v.norm()", "v.norm(1)", "v.norm(3)", "v.norm(inf)", "v.norm(0)", "v.view(3, 2).norm(dim=1)",
    "torch.linalg.vector_norm(v)", "torch.linalg.vector_norm(v, -inf)", "F.normalize(v, dim=0)",
    "torch.linalg.matrix_norm(v.view(3, 2))", "v.max()", "v.min()", "v.amax()", "v.amin(0)",
    "v.view(3, 2).max(dim=1).values", "v.view(3, 2).min(dim=0).values", "v.median()", "v.mean()",
    "v.view(2, 3).median(1).values", "v.nanmedian()", "v.std()", "v.var()",
    "v.std(0, correction=0)",
    "v.prod()", "v.view(3, 2).prod(1)", "v.cumprod(0)", "v.cumsum(0)", "v.logsumexp(0)",
    "v.softmax(0)", "v.log_softmax(0)", "v.sort().values * steps(v)", "v.cummax(0).values",
    "v.cummin(0).values", "v.topk(2).values", "v.kthvalue(3).values", "v.mode().values",
    "v.mean() * v", "v.aminmax().max", "v.quantile(0.3)", "v.logcumsumexp(0)", "v.nansum()",
    "F.layer_norm(v, (6,))", "F.group_norm(v.view(1, 2, 3), 2)", "F.rms_norm(v, (6,), eps=1e-6)",
    "F.max_pool1d(v[None, None], 2)", "F.adaptive_max_pool1d(v[None, None], 2)",
    "F.avg_pool1d(v[None, None], 2)", "F.lp_pool1d(v[None, None], 2, 2)", "v.diff().abs()",
    "v.masked_fill(v == v, -inf).logsumexp(0)", "v.masked_fill(v == v, -inf).softmax(0)",
    "v.view(3, 2).masked_fill(w.view(3, 2) > 0, -inf).softmax(1)",
    "v.view(3, 2).masked_fill(w.view(3, 2) > 0, -inf).logsumexp(1)", "torch.var_mean(v)[0]",
    "F.scaled_dot_product_attention(v.view(1, 3, 2), w.view(1, 3, 2), v.view(1, 3, 2))",
    "v.view(3, 2) @ v.view(2, 3)", "torch.einsum('i,i->', v, v)",
    "torch.trapezoid(v)",
)  # fmt: skip
INDEXED = (
    "v.new_zeros(3).scatter_reduce(0, ids(v, 0, 0, 1, 1, 2, 2), v, 'prod')",
    "v.new_zeros(3).scatter_reduce(0, ids(v, 0, 0, 1, 1, 2, 2), v, 'amax')",
    "v.new_ones(3).scatter_reduce(0, ids(v, 0, 0, 1, 1, 2, 2), v, 'amin', include_self=False)",
    "v.new_zeros(3).scatter_reduce(0, ids(v, 0, 0, 1, 1, 2, 2), v, 'mean', include_self=False)",
    "v.new_zeros(3).index_add(0, ids(v, 0, 0, 1, 1, 2, 2), v)",
    "v.index_put((ids(v, 0, 0, 2),), w[:3], accumulate=True) * v",
    "w.index_put((ids(v, 0, 0, 2),), v[:3], accumulate=True)", "v[ids(v, 0, 0, 5)] ** 2",
    "v.scatter(0, ids(v, 1, 3), w[:2]) * v", "v.gather(0, ids(v, 1, 1, 3)) ** 2",
    "v.index_fill(0, ids(v, 0, 2), 1.0) * v", "v.masked_scatter(v > 0, w) * v", "v.take(ids(v, 1))",
    "F.embedding(ids(v, 0, 2, 0), v.view(3, 2), padding_idx=0)",
    "F.embedding(ids(v, 0, 2, 0), v.view(3, 2), scale_grad_by_freq=True)",
    "F.embedding_bag(ids(v, 0, 2).view(1, 2), v.view(3, 2), padding_idx=0, mode='sum')",
    "F.embedding_bag(ids(v, 0, 2, 0).view(1, 3), v.view(3, 2), mode='mean')",
    "F.embedding_bag(ids(v, 0, 2, 1).view(1, 3), v.view(3, 2), mode='max')",
    "F.grid_sample(v.view(1, 1, 2, 3), w.view(1, 1, 3, 2), align_corners=True)",
    "F.grid_sample(steps(v).view(1, 1, 2, 3), v.view(1, 1, 3, 2), align_corners=False)",
    "F.grid_sample(image(v), v.view(1, 1, 3, 2), padding_mode='border', align_corners=False)",
    "F.interpolate(v.view(1, 1, 6), size=4, mode='linear')", "v[:0].sum() + v.sum()",
    "v[:0].prod()",
    "torch.cat([v[:0], v]) * v", "v[:0].view(0, 3).amax(1).sum() + v[0]",
    "v.roll(2) * v", "v.flip(0) * v", "v.view(3, 2).t().reshape(-1) * v", "v.expand(2, 6).sum(0)",
    "v.as_strided((3,), (2,)) * v[:3]", "v.unfold(0, 3, 1).amax(1)",
)  # fmt: skip
COMPLEX = (
    "z(v).abs()", "z(v).angle()", "real(z(v).sgn())", "real(z(v).conj()) * 2", "z(v).real * v[:3]",
    "z(v).conj().imag", "z(v).conj().resolve_conj().abs()", "real(z(v) * z(w).conj())",
    "real(z(v) ** 2)", "real(z(v) ** 0)", "real(z(v).prod())", "real(z(v).sqrt())",
    "real(z(v).exp())", "real(z(v).log())", "z(v).norm()", "real(z(v).cumprod(0))",
    "real(torch.fft.fft(v))", "torch.fft.irfft(z(v), 4)", "real(torch.polar(v.abs(), w))",
    "(z(v) * z(v).conj()).real.sqrt()", "real(z(v) / z(w))", "real(z(v).mean())", "z(v).abs() ** 2",
)  # fmt: skip
STOPPED = (
    "v * v.detach()", "v * v.data", "v + (v.round() - v).detach()", "v / v.detach().abs().max()",
    "v * without(v)", "v * decorated(v)", "hooked(v * 2)", "v * frozen(v)", "straight(v) * v",
    "v * v.clone().detach_()", "v * v.new_tensor(2.0)", "v * (3 if torch.is_grad_enabled() else 2)",
    "v * (3 if v.requires_grad else 2)", "reentrant(v)", "checkpointed(v)", "module_hooks(v)",
    "once(v) * v", "dirty(v * 1) * v", "two(v)[0] * two(v)[1].sin()", "target_network(v)",
    "v * no_grad_then_grad(v)", "v.clone().mul_(v).sin_()", "written_through(v)", "retained(v)",
    "inner_gradient(v)", "second_gradient(v)", "twice_hooked(v)", "v * v.detach().requires_grad_()",
    "removed_hook(v)", "pre_hooks(v)", "v.relu().detach() + v.relu()", "nothing_saved(v)",
    "v.requires_grad_(v.requires_grad) * v",
)  # fmt: skip

EVERY = (*ELEMENTWISE, *PAIRS, *LOSSES, *REDUCTIONS, *INDEXED, *COMPLEX, *STOPPED)
EVERY = tuple(line for line in EVERY if "aminmax" not in line or torch.__version__ >= "2.13")

ANY_OF_TIES = ("v.topk(2).values", "v.kthvalue(3).values", "v.mode().values")
"""Torch leaves open which of equal elements these choose: gradients of equal elements are added."""


def ids(v, *numbers):
    """Indices on the device of a tensor."""
    return torch.tensor(numbers, device=v.device)


def steps(v):
    """0, 1, 2, .. in the dtype of a tensor."""
    return torch.arange(6, device=v.device).to(v.dtype)


def image(v):
    """One image of 2 x 3."""
    return steps(v).view(1, 1, 2, 3)


def ones(v):
    """Targets of losses."""
    return torch.ones_like(v).detach()


def z(v):
    """Three complex numbers."""
    return torch.view_as_complex(v.reshape(3, 2))


def real(c):
    """Real numbers of complex ones."""
    return torch.view_as_real(c.resolve_conj())


def without(v):
    """Of code that runs with gradients off."""
    with torch.no_grad():
        return v * 3


@torch.no_grad()
def decorated(v):
    """As `without`."""
    return v * v


def no_grad_then_grad(v):
    """Gradients are on again inside."""
    with torch.no_grad():
        first = v * 2
        with torch.enable_grad():
            return first + v


def hooked(v):
    """Of a tensor whose gradient a hook changes."""
    if v.requires_grad:
        v.register_hook(lambda gradient: gradient * 10)
    return v


def twice_hooked(v):
    """Hooks run in the order in which they are registered."""
    v = v * 1
    if v.requires_grad:
        v.register_hook(lambda gradient: gradient * 10)
        v.register_hook(lambda gradient: gradient + 1)
    return v * 2


def removed_hook(v):
    """A hook that is gone."""
    v = v * 1
    if v.requires_grad:
        v.register_hook(lambda gradient: gradient * 10).remove()
    return v * 2


def frozen(v):
    """Of a layer whose result is a target."""
    with torch.inference_mode():
        target = v * 2
    return target.clone()


def target_network(v):
    """A loss between a network and a copy that is not trained."""
    online, target = v.sin(), v.detach().sin()
    return (online * 2 - target.roll(1)) ** 2


def written_through(v):
    """A write through a view of what has a graph."""
    v = v * 2
    v[1:3].mul_(v[3:5].clone())
    v[0] = v[5] * 2
    return v


def retained(v):
    """A gradient in the middle that is kept."""
    v = v * 2
    if v.requires_grad:
        v.retain_grad()
    return v * v


def inner_gradient(v):
    """A gradient that is a value of the code."""
    v = v if v.requires_grad else v.detach().requires_grad_()
    with torch.enable_grad():
        (found,) = torch.autograd.grad((v**2).sum(), v)
    return found * v


def second_gradient(v):
    """A gradient with a graph."""
    v = v if v.requires_grad else v.detach().requires_grad_()
    with torch.enable_grad():
        (found,) = torch.autograd.grad((v**3).sum(), v, create_graph=True)
    return found * v


class Layer(torch.nn.Module):
    """A module for hooks."""

    def forward(self, v):
        """A function with a kink."""
        return torch.relu(v) * v


def module_hooks(v):
    """Hooks of a module, forward and backward."""
    layer = Layer()
    layer.register_forward_hook(lambda module, given, result: result * 2)
    layer.register_full_backward_hook(lambda module, given, result: (given[0] * 3,))
    return layer(v * 1)


def pre_hooks(v):
    """Hooks of a module that change what comes in."""
    layer = Layer()
    layer.register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    layer.register_full_backward_pre_hook(lambda module, result: (result[0] * 3,))
    return layer(v * 1)


def checkpointed(v):
    """Computed again in the backward pass."""
    return checkpoint(lambda x: torch.relu(x).sin() * x, v, use_reentrant=False)


def reentrant(v):
    """As `checkpointed`, by a backward in the backward."""
    return checkpoint(lambda x: torch.relu(x).sin() * x, v, use_reentrant=True)


def nothing_saved(v):
    """What the backward needs passes hooks."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x * 1, lambda x: x * 2)
    with hooks:
        return v * v


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(context, v):
        return v.sign()

    @staticmethod
    def backward(context, gradient):
        return gradient.clamp(-1, 1)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(context, v):
        context.save_for_backward(v)
        return v.abs()

    @staticmethod
    @once_differentiable
    def backward(context, gradient):
        return gradient * context.saved_tensors[0] * 7


class _Dirty(torch.autograd.Function):
    @staticmethod
    def forward(context, v):
        v.mul_(3)
        context.mark_dirty(v)
        return v

    @staticmethod
    def backward(context, gradient):
        return gradient * 5


class _Two(torch.autograd.Function):
    @staticmethod
    def forward(context, v):
        return v * 2, v * 3

    @staticmethod
    def backward(context, first, second):
        return first.clamp(max=1.5) - second


straight, once, dirty, two = _Straight.apply, _Once.apply, _Dirty.apply, _Two.apply


@functools.cache
def scalar(line: str) -> Callable[[Any, Any], Any]:
    """The function of a line: its results are weighed and added."""
    code = compile(line, "<line>", "eval")
    names = globals() | {"F": functional}

    def function(v, w, plain=False):
        result = eval(code, names, {"v": v, "w": w})
        if plain:
            return result
        weights = torch.linspace(1, 2, result.numel(), dtype=result.dtype, device=result.device)
        return (result * weights.reshape(result.shape)).sum()

    return function


@functools.cache
def wanted(line: str, name: str) -> Any:
    """CPU torch's gradient at a point, in float64."""
    point = torch.tensor(POINTS[name], dtype=torch.float64)
    v, w = point.clone().requires_grad_(), point.flip(0)
    result = scalar(line)(v, w)
    if result.requires_grad:
        result.backward()
    return (torch.zeros_like(point) if v.grad is None else v.grad).numpy()
