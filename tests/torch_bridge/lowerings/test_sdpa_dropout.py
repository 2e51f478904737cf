"""Dropout of attention weights: the same on every layout, in the gradient, and in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attend

import isoshard as iso
import isoshard.torch_bridge as xs
from benchmarks import collectives
from isoshard import P
from isoshard.core.nn.dropout import gains

RATE = 0.3
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).float()


def operands(key_heads=4, length=16):
    key = (2, key_heads, length, 8)
    return draw(2, 4, length, 8), draw(*key, seed=1), draw(*key, seed=2)


@functools.cache
def factors(seed, shape):
    """What the weights are multiplied by, in the first attention after that seed."""
    torch.manual_seed(seed)
    x = torch.ones(1, 1, 1, 1, device="jax")
    words = EFFICIENT(x, x, x, None, True, RATE)[2].cpu()
    bits = jax.lax.bitcast_convert_type(jnp.asarray(words.numpy()), jnp.uint32)
    return torch.from_numpy(np.array(gains(bits, RATE, shape))).double()


def dense(tensors, times, mask=None, causal=False):
    """Attention whose weights are multiplied by factors, in float64."""
    q, k, v = tensors
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=bool).tril(), -torch.inf)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1) * times @ v


def gradients(function, tensors, grad):
    out = function(*tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad)]


def expected(tensors, seed=5, **options):
    wide = [x.double().requires_grad_() for x in tensors]
    times = factors(seed, (*tensors[0].shape[:-1], tensors[1].shape[-2]))
    out = lambda *tensors: dense(tensors[:3], times, *tensors[3:], **options)  # noqa: E731
    return gradients(out, wide, torch.ones_like(wide[0]).cumsum(-1))


def found(given, seed=5, **options):
    """By a captured step; and its program."""
    grad = torch.ones(given[0].shape).cumsum(-1).to("jax")

    def function(q, k, v, *mask):
        return attend(q, k, v, *mask, dropout_p=RATE, **options)

    step = xs.compile(lambda grad, *given: gradients(function, given, grad))
    torch.manual_seed(seed)
    return step(grad, *given), xs.program_text(step)


def check(have, want):
    for own, one in zip(have, want, strict=True):
        torch.testing.assert_close(own.cpu().double(), one, rtol=1e-5, atol=2e-5)


def test_in_a_ring_a_mask_has_a_gradient_and_nothing_is_gathered():
    mesh = iso.make_mesh((2, 2), ("x", "y"))
    tensors, mask = operands(), draw(2, 1, 1, 16, seed=3)
    given = [iso.shard(x, mesh, P(None, "x", "y")).requires_grad_() for x in tensors]
    have, text = found([*given, mask.to("jax").requires_grad_()])
    check(have, expected([*tensors, mask]))
    sent = collectives.summarize(text)
    assert "collective-permute" in sent and "all-gather" not in sent


def test_gradients_of_gradients_drop_the_same():
    tensors = operands(key_heads=2)

    def second(function, given):
        grad = torch.ones_like(given[0]).cumsum(-1)
        first = torch.autograd.grad(function(*given), given, grad, create_graph=True)
        again = torch.autograd.grad(sum((x**2).sum() for x in first), given)
        return [*(x.detach() for x in first), *again]

    times = factors(5, (2, 4, 16, 16))
    want = second(lambda *x: dense(x, times, causal=True), [x.double().requires_grad_() for x in tensors])  # fmt: skip # noqa: E501
    torch.manual_seed(5)
    have = second(
        lambda *x: attend(*x, dropout_p=RATE, is_causal=True, enable_gqa=True),
        [x.to("jax").requires_grad_() for x in tensors],
    )
    for own, one in zip(have, want, strict=True):
        torch.testing.assert_close(own.cpu().double(), one, rtol=1e-4, atol=1e-3)


def test_a_share_is_dropped_and_the_rest_makes_up_for_it():
    times = factors(1, (4, 8, 64, 64))
    share = (times == 0).double().mean().item()
    assert share == pytest.approx(RATE, abs=0.01)
    assert times.max().item() == pytest.approx(1 / (1 - RATE))
    rows = (times == 0).double().mean((0, 1, 2))  # no key is dropped more than others
    assert abs(rows - RATE).max() < 0.06
    q, k, v = (x.to("jax") for x in operands())
    step = xs.compile(lambda q, k, v: attend(q, k, v, dropout_p=RATE))
    assert not torch.equal(step(q, k, v).cpu(), step(q, k, v).cpu())  # others in each step
    with pytest.raises(RuntimeError, match="dropout probability has to be between 0 and 1"):
        attend(q, k, v, dropout_p=1.5).cpu()


def test_without_dropout_nothing_is_drawn():
    q, k, v = (x.to("jax").requires_grad_() for x in operands())
    mask = torch.zeros(16, 16, device="jax", requires_grad=True)
    torch.manual_seed(3)
    want = torch.rand(4, device="jax").cpu()
    torch.manual_seed(3)
    attend(q, k, v, mask).sum().backward()
    assert torch.equal(torch.rand(4, device="jax").cpu(), want)
