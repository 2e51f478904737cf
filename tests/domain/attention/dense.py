"""What the tests compare with: attention of global arrays in NumPy's float64, and its gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.nn import dropout

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
NAMES = ("out", "dq", "dk", "dv", "dmask")


def arrays(batch=2, queries=32, keys=None, heads=4, key_heads=None, width=8, values=None, seed=0):
    """Random float32 queries, keys, values and gradient of the result."""
    keys, key_heads, values = keys or queries, key_heads or heads, values or width
    random = np.random.default_rng(seed)
    shapes = [
        (batch, queries, heads, width),
        (batch, keys, key_heads, width),
        (batch, keys, key_heads, values),
        (batch, queries, heads, values),
    ]
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


def visible(q, k, causal=False, mask=None, query_lengths=None, key_lengths=None):
    """Which keys each query sees: bool[batch, heads, queries, keys]."""
    rows, columns = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])
    seen = np.ones((q.shape[0], q.shape[2], q.shape[1], k.shape[1]), bool)
    if causal:
        seen = seen & (columns <= rows)
    if mask is not None:
        seen = seen & np.asarray(mask)
    if query_lengths is not None:
        seen = seen & (rows < np.asarray(query_lengths)[:, None, None, None])
    if key_lengths is not None:
        seen = seen & (columns < np.asarray(key_lengths)[:, None, None, None])
    return seen


def factors(q, k, rate, key):
    """What dropout multiplies the weights by."""
    numbers = [jnp.arange(n) for n in (q.shape[0], q.shape[2], q.shape[1], k.shape[1])]
    return np.asarray(jax.jit(dropout.keep, static_argnums=1)(key, rate, *numbers)) / (1 - rate)


def attention(q, k, v, dout, seen, scale=None, factor=1.0, added=None):
    """The result, and the gradients of q, k, v, and of what is added to the scores."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    ks, vs = np.repeat(k, group, 2), np.repeat(v, group, 2)
    scores = scale * np.einsum("bqhw,bkhw->bhqk", q, ks) + (0 if added is None else added)
    scores = np.where(seen, scores, -np.inf)
    top = np.maximum(scores.max(-1, keepdims=True), -1e30)
    weights = np.exp(scores - top)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    out = np.einsum("bhqk,bkhw->bqhw", weights * factor, vs)
    dweights = np.einsum("bqhw,bkhw->bhqk", dout, vs) * factor
    slopes = weights * (dweights - (weights * dweights).sum(-1, keepdims=True))
    dscores = scale * slopes
    dq = np.einsum("bhqk,bkhw->bqhw", dscores, ks)
    dk = np.einsum("bhqk,bqhw->bkhw", dscores, q)
    dv = np.einsum("bhqk,bqhw->bkhw", weights * factor, dout)
    dk, dv = (x.reshape(*k.shape[:3], group, -1).sum(3) for x in (dk, dv))
    if added is None:
        return out, dq, dk, dv
    over = tuple(axis for axis, extent in enumerate(added.shape) if extent == 1)
    return out, dq, dk, dv, slopes.sum(over, keepdims=True)


def program(function):
    """A function of q, k, v and the gradient of the result: the result, and their gradients.

    After the gradient may come a mask, which `function` then takes, and has a gradient too.
    """

    def both(q, k, v, dout, *mask):
        out, back = jax.vjp(function, q, k, v, *mask)
        return out, *back(dout)

    return jax.jit(both)


def check(found, wanted, **close):
    """Compare the result and the three gradients."""
    for name, have, want in zip(NAMES[: len(wanted)], found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(have), want, err_msg=name, **(CLOSE | close))
