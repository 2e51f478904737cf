"""Attention of whole sequences and its parts, against CPU torch in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from isoshard.core.nn import dot_product_attention as nn

pytestmark = pytest.mark.usefixtures("x64")
attend = jax.jit(nn.attend, static_argnames=("scale", "causal"))
gradients = jax.jit(nn.gradients, static_argnames=("scale", "causal"))
LEAD, HEADS, QUERIES, KEYS, WIDTH, VALUES = (3,), 4, 5, 7, 8, 6
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def operands(lead=LEAD, heads=HEADS, key_heads=HEADS):
    """Queries, keys, values and the gradient of the result."""
    return (
        numbers(*lead, heads, QUERIES, WIDTH, seed=1),
        numbers(*lead, key_heads, KEYS, WIDTH, seed=2),
        numbers(*lead, key_heads, KEYS, VALUES, seed=3),
        numbers(*lead, heads, QUERIES, VALUES, seed=4),
    )


def check(found, wanted, name=""):
    for have, want in zip(found, wanted, strict=True):
        want = want.detach().numpy() if isinstance(want, torch.Tensor) else want
        np.testing.assert_allclose(np.asarray(have), want, **CLOSE, err_msg=name)


def of_torch(q, k, v, dout, mask=None, **options):
    """The result and the gradients of queries, keys, values, and of a mask that is added."""
    leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    given = None if mask is None else torch.from_numpy(mask)
    added = mask is not None and mask.dtype != bool
    wanted = [*leaves, given.requires_grad_()] if added else leaves
    out = scaled_dot_product_attention(
        *leaves, attn_mask=given, enable_gqa=q.shape[-3] != k.shape[-3], **options
    )
    return out, *torch.autograd.grad(out, wanted, torch.from_numpy(dout))


HIDDEN = numbers(QUERIES, KEYS) > 0
MASKS = {
    "none": None,
    "bool": numbers(*LEAD, HEADS, QUERIES, KEYS) > -1,
    "bool, for all": HIDDEN | (np.arange(KEYS) == 0),
    "added": numbers(*LEAD, HEADS, QUERIES, KEYS),
    "added, for all": numbers(QUERIES, KEYS),
    "added, by head and key": numbers(1, HEADS, 1, KEYS),
}


def test_attention_is_torchs():
    """With every mask, and one head of keys for one, two or four heads."""
    scale = 0.3
    given = {name: (*operands(key_heads=(4, 2, 1)[n % 3]), MASKS[name])
             for n, name in enumerate(MASKS)}  # fmt: skip

    @jax.jit
    def ours(given):
        found = {}
        for name, (q, k, v, dout, mask) in given.items():
            out, log = nn.attend(q, k, v, mask, scale=scale)
            *slopes, scores = nn.gradients(dout, q, k, v, mask, scale=scale)
            if name.startswith("added"):
                slopes.append(nn.summed_to(scores, mask.shape))
            found[name] = [out, *slopes, log]
        return found

    for name, found in ours(given).items():
        q, k, v, dout, mask = given[name]
        wanted = of_torch(q, k, v, dout, mask, scale=scale)
        all_keys = torch.from_numpy(k).repeat_interleave(HEADS // k.shape[-3], -3)
        products = torch.from_numpy(q) @ all_keys.mT * scale
        if mask is not None:
            hides = torch.from_numpy(mask)
            products = products.masked_fill(~hides, -torch.inf) if mask.dtype == bool else (
                products + hides
            )  # fmt: skip
        check(found, [*wanted, products.logsumexp(-1)], name)


def test_other_numbers_of_axes():
    lead = ()
    q, k, v, dout = operands(lead)
    scale = WIDTH**-0.5
    out, *wanted = of_torch(q, k, v, dout, is_causal=True)
    found, _ = attend(q, k, v, scale=scale, causal=True)
    check([found, *gradients(dout, q, k, v, scale=scale, causal=True)[:3]], [out, *wanted])
    check([attend(q[0], k[0], v[0], scale=scale, causal=True)[0]], [out[0]])


def test_jax_differentiates_it_likewise():
    """Also where the delta is given, and where weights are multiplied."""
    q, k, v, dout = operands(key_heads=2)
    gains = (numbers(*LEAD, HEADS, QUERIES, KEYS) > 0) * 2.0

    def function(q, k, v):
        return attend(q, k, v, HIDDEN, scale=0.3, gains=gains)[0]

    out, back = jax.vjp(function, q, k, v)
    for delta in (None, nn.products(out, jnp.asarray(dout))):
        options = {"scale": 0.3, "gains": gains, "delta": delta}
        check(gradients(dout, q, k, v, HIDDEN, **options)[:3], back(dout))


def test_a_query_that_sees_nothing_gives_zeros():
    q, k, v, dout = operands()
    hidden = HIDDEN.copy()
    hidden[2] = False
    out, log = attend(q, k, v, hidden, scale=1.0)
    found = gradients(dout, q, k, v, hidden, scale=1.0)
    assert not out[..., 2, :].any() and not found[0][..., 2, :].any()
    assert np.isneginf(log[..., 2]).all() and all(np.isfinite(x).all() for x in found)
    weights, total = nn.softmax(jnp.full((3, 0), 1.0))
    assert weights.shape == (3, 0) and np.isneginf(total).all()


def test_what_is_visible():
    """An order that ends at the last key, a window, and lengths."""
    own = jnp.arange(QUERIES)[:, None]
    assert nn.visible(own, KEYS) is None
    q, k, v, _ = operands()
    seen = nn.visible(own + KEYS - QUERIES, KEYS, after=0)
    out, _ = attend(q, k, v, seen, scale=WIDTH**-0.5)
    given = map(torch.from_numpy, (q, k, v))
    check([out], [scaled_dot_product_attention(*given, causal_lower_right(QUERIES, KEYS))])
    far = np.arange(KEYS) - np.arange(QUERIES)[:, None]
    near = nn.visible(own, KEYS, before=2, after=1)
    np.testing.assert_array_equal(near, (far >= -2) & (far <= 1))
    counts = np.array([0, 3, 9]).reshape(-1, 1, 1)
    seen = nn.visible(own, KEYS, after=0, count=jnp.asarray(counts))
    np.testing.assert_array_equal(seen, (far <= 0) & (np.arange(KEYS) < counts))


def test_a_mask_hides_by_any_number():
    scores = jnp.asarray(numbers(QUERIES, KEYS))
    np.testing.assert_array_equal(nn.masked(scores, jnp.zeros((1, KEYS), bool), -5.0), -5.0)
    assert nn.masked(scores, None) is scores
    assert nn.masked(scores.astype("float32"), scores).dtype == jnp.float32


def test_halves_are_added_up_in_float32():
    dtype = torch.bfloat16
    q, k, v, _ = (torch.from_numpy(x).to(dtype) for x in operands(key_heads=2))
    mine = [jnp.asarray(x.float().numpy()).astype(str(dtype)[6:]) for x in (q, k, v)]
    out, log = attend(*mine, scale=0.3)
    want = scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)), scale=0.3, enable_gqa=True
    )
    assert out.dtype == log.dtype == jnp.float32
    np.testing.assert_allclose(out, want.numpy(), rtol=2e-6, atol=2e-6)
