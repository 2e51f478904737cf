"""Losses against CPU torch: every reduction, weights, ignored targets, half precision."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from isoshard.torch_bridge.lowerings import registry
from tests.torch_bridge.lowerings.harness import check, evaluate, to_array

aten = torch.ops.aten
REDUCTIONS = [0, 1, 2]


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.rand(shape)


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    """Differences below, at and above 1, and equal elements."""
    x, target = torch.randn(3, 5) * 2, torch.randn(3, 5)
    target[0, :3] = x[0, :3] + torch.tensor([0.0, 1.0, -1.0])
    return x, target


def incoming(reduction: int, shape) -> torch.Tensor:
    return torch.tensor(1.7) if reduction else torch.randn(shape)


PLAIN = {
    "mse_loss": (),
    "smooth_l1_loss": (0.7,),
    "huber_loss": (1.0,),
    "soft_margin_loss": (),
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", PLAIN)
def test_elementwise(name, reduction):
    x, target = pair()
    op, backward = (getattr(aten, n).default for n in (name, f"{name}_backward"))
    check(op, x, target, reduction, *PLAIN[name])
    check(backward, incoming(reduction, x.shape), x, target, reduction, *PLAIN[name])
    half = x.bfloat16(), target.bfloat16()
    check(op, *half, reduction, *PLAIN[name], rtol=2e-2, atol=2e-2)


def test_smooth_l1_without_a_smooth_part_is_l1():
    x, target = pair()
    check(aten.smooth_l1_loss.default, x, target, 1, 0.0)
    check(aten.smooth_l1_loss_backward.default, torch.tensor(1.0), x, target, 1, 0.0)


def test_mixed_dtypes_and_empty():
    x, target = pair()
    (got,) = evaluate(aten.mse_loss.default, x, target.bfloat16())
    assert got.dtype == np.float32
    check(aten.mse_loss.default, x[:0], target[:0], 2)
    check(aten.mse_loss_backward.default, torch.tensor(1.0), x[:0], target[:0], 2)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_binary_cross_entropy(weighted, reduction):
    p, target = rand(3, 5), rand(3, 5, seed=1).round()
    p[0, :2] = torch.tensor([0.0, 1.0])
    weight = rand(3, 5, seed=2) if weighted else None
    check(aten.binary_cross_entropy.default, p, target, weight, reduction)
    grad = incoming(reduction, p.shape)
    check(aten.binary_cross_entropy_backward.default, grad, p, target, weight, reduction)
    logits, positive = torch.randn(3, 5) * 50, rand(5) if weighted else None
    arguments = (logits, target, weight, positive, reduction)
    check(aten.binary_cross_entropy_with_logits.default, *arguments, rtol=1e-4, atol=1e-4)


# Negative log likelihood


def targets(x: torch.Tensor, ignore: int) -> torch.Tensor:
    """Valid classes, some of them ignored."""
    shape = x.shape[:1] + x.shape[2:] if x.ndim > 1 else ()
    target = torch.randint(0, x.shape[1 if x.ndim > 1 else 0], shape)
    if target.ndim:
        target.view(-1)[0] = ignore
    return target


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(6, 4), (2, 4, 3, 2)])
@pytest.mark.parametrize("ignore", [-100, 2])
def test_nll(shape, weighted, reduction, ignore):
    torch.manual_seed(0)
    x = torch.randn(shape).log_softmax(1)
    name = "nll_loss" if len(shape) == 2 else "nll_loss2d"
    forward, backward = (getattr(aten, n).default for n in (f"{name}_forward", f"{name}_backward"))
    target, weight = targets(x, ignore), rand(4) if weighted else None
    options = (weight, reduction, ignore)
    check(forward, x, target, *options)
    _, total = forward(x, target, *options)
    grad = incoming(reduction, target.shape)
    check(backward, grad, x, target, *options, total)


def test_nll_of_one_sample():
    x, target = torch.randn(4), torch.tensor(2)
    check(aten.nll_loss_forward.default, x, target, None, 1, -100)
    check(aten.nll_loss_backward.default, torch.tensor(1.0), x, target, None, 1, -100,
          torch.tensor(1.0))  # fmt: skip


def test_nll_of_nothing_but_ignored_targets():
    x, target = torch.randn(3, 4), torch.full((3,), -100)
    check(aten.nll_loss_forward.default, x, target, None, 1, -100)
    check(aten.nll_loss_forward.default, x, target, None, 2, -100)


def test_nll_ignores_infinite_scores_of_ignored_targets():
    x = torch.randn(3, 4)
    x[0] = -float("inf")
    check(aten.nll_loss_forward.default, x, torch.tensor([-100, 1, 2]), None, 1, -100)


# Margins. torch has no meta kernel for the backwards, so they are called directly.


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize(("shape", "reduction"), [((6, 4), 0), ((6, 4), 1), ((4,), 1), ((4,), 2)])
def test_multi_margin(shape, p, reduction):
    x, weight = torch.randn(shape), rand(4)
    target = torch.randint(0, 4, shape[:-1])
    options = (p, 0.8, weight, reduction)
    check(aten.multi_margin_loss.default, x, target, *options)
    grad = incoming(reduction, target.shape)
    backward(aten.multi_margin_loss_backward, grad, x, target, *options)


@pytest.mark.parametrize(("shape", "reduction"), [((3, 4), 0), ((3, 4), 1), ((4,), 1), ((4,), 2)])
def test_multilabel_margin(shape, reduction):
    x = torch.randn(shape)
    rows = torch.tensor([[1, 3, -1, 0], [-1, 0, 1, 2], [3, 2, 1, 0]])
    target = rows if len(shape) == 2 else rows[0]
    check(aten.multilabel_margin_loss_forward.default, x, target, reduction)
    _, is_target = aten.multilabel_margin_loss_forward(x, target, reduction)
    grad = incoming(reduction, target.shape[:-1])
    backward(aten.multilabel_margin_loss_backward, grad, x, target, reduction, is_target)


def backward(op, *arguments):
    arrays = [to_array(a) if isinstance(a, torch.Tensor) else a for a in arguments]
    got = registry.find(op.default).function(*arrays)
    np.testing.assert_allclose(got, op(*arguments), rtol=1e-4, atol=1e-5)


def test_invalid_class_is_seen():
    """A class out of range gives NaN, never the score of a neighbour."""
    function = registry.find(aten.nll_loss_forward.default).function
    loss, _ = function(jnp.zeros((1, 3)), jnp.array([7]), None, 1, -100)
    assert jnp.isnan(loss)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", ["huber_loss", "soft_margin_loss", "smooth_l1_loss", "l1_loss"])
def test_the_dtype_of_a_loss_of_two_dtypes(name, reduction):
    loss = getattr(torch.nn.functional, name)
    x, y = torch.randn(3, 4), torch.rand(3, 4)
    for one, other in ((x, y.double()), (x.double(), y), (x.bfloat16(), y)):
        want = loss(one, other, reduction=reduction)
        got = loss(one.to("jax"), other.to("jax"), reduction=reduction)
        assert got.dtype == want.dtype
        rtol, atol = (2e-2, 1e-2) if torch.bfloat16 in (one.dtype, other.dtype) else (1e-5, 1e-6)
        torch.testing.assert_close(got.cpu(), want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", ["huber_loss", "soft_margin_loss", "mse_loss", "smooth_l1_loss"])
def test_each_loss_lies_as_the_scores_do(name):
    x, target = torch.randn(4, 3, 2).permute(2, 0, 1), torch.randn(2, 4, 3)
    want = getattr(F, name)(x, target, reduction="none")
    got = getattr(F, name)(x.to("jax"), target.to("jax"), reduction="none")
    assert got.stride() == want.stride()
    torch.testing.assert_close(got.cpu(), want)
