"""Attention whose layout the compiler finds, against dense attention in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.nn.dropout import gains, words_of
from isoshard.core.transfer.device_put import shard
from isoshard.domain.attention.partitioned_attention import Attention
from tests.domain.attention import dense

# The compiler lays out such an operator, which programs of the engine have under Auto axes.
make_mesh = functools.partial(iso.make_mesh, axis_types=AxisType.Auto)
MESH = make_mesh((2, 2, 2), ("x", "y", "z"))


def run(x, specs, mask=None, causal=False, wants_mask=False, mesh=MESH):
    """The result and the gradients, of operands [.., heads, length, width] sharded by `specs`."""
    static = Attention(causal, x[0].shape[-1] ** -0.5, tile=4)
    placed = [shard(a, mesh, s) for a, s in zip(x, (specs[0], *specs[1:3], specs[0]), strict=True)]
    masks = [] if mask is None else [shard(mask, mesh, ())]

    @jax.jit
    def both(q, k, v, dout, *masks):
        out, log = static(q, k, v, *masks)
        given = masks[0] if masks else None
        delta = jnp.einsum("...e,...e->...", out, dout)
        found = static.gradients(dout, q, k, v, given, log, delta, wants_mask)
        return out, *[x for x in found if x is not None]

    compiled = both.lower(*placed, *masks).compile()
    return compiled(*placed, *masks), compiled.as_text()


def wanted(x, mask=None, causal=False):
    """In float64, by the dense attention of the other tests: of four axes, sequence first."""
    lead, (heads, queries, width) = x[0].shape[:-3], x[0].shape[-3:]
    four = [a.reshape(-1, *a.shape[-3:]).swapaxes(1, 2) for a in x]
    batch, keys = four[0].shape[0], four[1].shape[1]
    seen, added = dense.visible(*four[:2], causal), None
    if mask is not None:
        mask = np.broadcast_to(mask, (*lead, heads, queries, keys)).reshape(
            batch, heads, queries, -1
        )
        seen, added = (seen & mask, None) if mask.dtype == bool else (seen, mask)
    found = dense.attention(*four, seen, width**-0.5, added=added)
    pairs = zip(found[:4], (x[3], *x[:3]), strict=True)
    back = [a.swapaxes(1, 2).reshape(like.shape) for a, like in pairs]
    return back, None if added is None else found[4]


def arrays(*lead, heads=4, key_heads=None, queries=16, keys=None, width=8, values=None):
    x = dense.arrays(math.prod(lead), queries, keys, heads, key_heads, width, values)
    return [a.swapaxes(1, 2).reshape(*lead, a.shape[2], a.shape[1], a.shape[3]) for a in x]


SPLIT = {
    "ring": (P("x", None, ("y", "z")),) * 3,
    "heads as well": (P(None, "x", "y"),) * 3,
    "queries only": (P(None, None, ("x", "y")), P(), P()),
    "keys only": (P(), *(P(None, "x", ("y", "z")),) * 2),
    "by different axes": (P(None, None, "x"), *(P(None, None, ("y", "z")),) * 2),
    "by some axes in common": (P(None, None, ("x", "y")), *(P(None, None, "x"),) * 2),
}


@pytest.mark.parametrize("name", ["heads as well", "queries only", "by some axes in common"])
def test_wherever_the_operands_lie(name):
    x = arrays(2, key_heads=2, values=5)
    causal = name == "heads as well"
    found, text = run(x, SPLIT[name], causal=causal)
    dense.check(found, wanted(x, causal=causal)[0])
    if name == "heads as well":
        assert "all-gather" not in text and "all-reduce" not in text
        like = NamedSharding(MESH, SPLIT[name][0])
        assert all(array.sharding.is_equivalent_to(like, 4) for array in found)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("ring", (2, 1, 1, 16)),
        ("by different axes", (4, 16, 1)),
    ],
)
def test_masks_that_are_added(name, shape):
    """Their gradient is the sum over what they were broadcast to, on all devices."""
    x = arrays(2)
    mask = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    found, _ = run(x, SPLIT[name], mask, causal=shape[-2] == 1, wants_mask=True)
    expected, slopes = wanted(x, mask, shape[-2] == 1)
    dense.check(found[:4], expected)
    over = [n for n, m in enumerate((1,) * (4 - len(shape)) + shape) if m == 1]
    slopes = slopes.sum(tuple(over), keepdims=True).reshape(shape)
    np.testing.assert_allclose(found[4], slopes, **dense.CLOSE)


def test_masks_that_hide():
    """Some queries see nothing, on no device; their result and gradient are 0."""
    x, name = arrays(2), "keys only"
    mask = np.random.default_rng(1).random((4, 16, 16)) < 0.5
    mask[:, 3] = False
    found, _ = run(x, SPLIT[name], mask)
    dense.check(found, wanted(x, mask)[0])
    assert not np.asarray(found[0])[:, :, 3].any()


def test_lengths_that_do_not_divide():
    """As with a class token among the patches: the compiler pads, and nothing of it is read."""
    x = arrays(2, queries=3, keys=17)
    static = Attention(True, 8**-0.5, tile=16)
    layouts = [NamedSharding(MESH, P("x", None, "y"))] * 4

    @jax.jit
    def both(*x):
        x = [jnp.pad(a * 2, [(0, 0)] * 2 + [(0, 1), (0, 0)])[..., :-1, :] / 2 for a in x]
        q, k, v, dout = map(jax.lax.with_sharding_constraint, x, layouts)
        (out, log), back = jax.vjp(lambda q, k, v: static(q, k, v), q, k, v)
        return out, *back((dout, jnp.zeros_like(log)))

    dense.check(both(*x), wanted(x, causal=True)[0])


def test_other_numbers_of_axes():
    lead = (2, 2)
    x = arrays(*lead, key_heads=1)
    spec = P("z", None, None, "y")
    mask = np.random.default_rng(1).standard_normal((*lead[:1], *(1,) * len(lead), 16, 16))
    mask = mask.astype(np.float32)
    found, text = run(x, (spec,) * 3, mask, causal=True, wants_mask=True)
    expected, slopes = wanted(x, mask, True)
    dense.check(found[:4], expected)
    slopes = slopes.reshape(*lead, 4, 16, 16)
    over = tuple(n for n, m in enumerate((1,) * (slopes.ndim - mask.ndim) + mask.shape) if m == 1)
    slopes = slopes.sum(over, keepdims=True).reshape(mask.shape)
    np.testing.assert_allclose(found[4], slopes, **dense.CLOSE)
    assert "collective-permute" in text and "all-gather" not in text


def test_jax_differentiates_it_and_its_logarithms():
    """With dropout; no mask of it crosses the devices."""
    x, rate = arrays(2), 0.3
    static = Attention(False, 8**-0.5, tile=4, rate=rate)
    words = words_of(jax.random.key(3))
    times = np.asarray(jax.jit(lambda words: gains(words, rate, (2, 4, 16, 16)))(words))
    mask = np.random.default_rng(1).standard_normal((16, 16)).astype(np.float32)

    def loss(q, k, v, mask):
        out, log = static(q, k, v, mask, words)
        return (out * x[3]).sum() + (log**2).sum()

    placed = [shard(a, MESH, P("x", None, "y")) for a in x[:3]]
    found = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*placed, mask)
    tensors = [torch.tensor(a.astype(np.float64), requires_grad=True) for a in (*x[:3], mask)]
    q, k, v, added = tensors
    scores = 8**-0.5 * q @ k.mT + added
    out = scores.softmax(-1) * torch.tensor(times) @ v
    ((out * torch.tensor(x[3])).sum() + scores.logsumexp(-1).square().sum()).backward()
    for have, want in zip(found, tensors, strict=True):
        np.testing.assert_allclose(have, want.grad, rtol=1e-4, atol=1e-4)
