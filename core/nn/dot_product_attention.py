"""Scaled dot-product attention of unsharded sequences, its steps and its gradient.

Axes are torch's: (.., heads, length, width), or (length, width) without heads. Batch and heads are
kept as separate axes, so splitting either over a mesh needs no collective. With fewer heads in keys
than in queries (grouped queries), those of the queries are reshaped to `(heads of keys, group)` in
the products, and nothing is repeated:

>>> q, k = jnp.ones((1, 4, 2, 8)), jnp.ones((1, 2, 3, 8))
>>> scores(q, k).shape, jax.jit(attend)(q, k, k, scale=1.0)[0].shape
((1, 4, 2, 3), (1, 4, 2, 8))

Masks are of bool, where True is visible, or of floats, which are added. Causal masks, aligned at
the top left or at the bottom right, come from `visible`:

>>> rows = jnp.arange(2)[:, None]
>>> visible(rows, 3, after=0).tolist()
[[True, False, False], [True, True, False]]
>>> visible(rows + 1, 3, after=0, before=1).tolist()
[[True, True, False], [False, True, True]]
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np


def wide(dtype: np.dtype) -> np.dtype:
    """The dtype of sums: float32, or float64 of float64."""
    return jnp.promote_types(dtype, jnp.float32)


def scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """The products of queries and keys, (.., heads, queries, keys), in at least float32.

    Args:
        q: (.., heads, queries, width).
        k: (.., key heads, keys, width); `heads` is a multiple of `key heads`.
    """
    if not _is_grouped(q, k):
        return _product("...le,...se->...ls", q, k)
    return _ungrouped(_product("...gle,...se->...gls", _grouped(q, k), k))


def weighted(weights: jax.Array, v: jax.Array) -> jax.Array:
    """The sums over keys of weighted values, (.., heads, queries, width), in at least float32.

    Args:
        weights: (.., heads, queries, keys).
        v: (.., key heads, keys, width).
    """
    if not _is_grouped(weights, v):
        return _mixed("...ls,...se->...le", weights, v)
    return _ungrouped(_mixed("...gls,...se->...gle", _grouped(weights, v), v))


def weighted_back(weights: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
    """The sums over queries of weighted queries, in the shape of keys and at least float32.

    Args:
        weights: (.., heads, queries, keys).
        q: (.., heads, queries, width).
        k: (.., key heads, keys, any width): only its heads matter.
    """
    if not _is_grouped(q, k):
        return _mixed("...ls,...le->...se", weights, q)
    return _mixed("...hgls,...hgle->...hse", _grouped(weights, k), _grouped(q, k))


def visible(
    query_position: jax.Array,
    keys: int,
    *,
    before: int | None = None,
    after: int | None = None,
    count: jax.Array | None = None,
) -> jax.Array | None:
    """The mask of keys that are visible to queries by position; None for all.

    Args:
        query_position: integers, (.., queries, 1), the position of each query among the keys.
        keys: the number of keys.
        before: the number of visible keys before the query's position; None for all.
        after: the number of visible keys after it; None for all.
        count: integers that broadcast with `query_position`, the number of valid keys; None for
            all.

    Returns:
        bool, (.., queries, keys).
    """
    position = jax.lax.broadcasted_iota(jnp.int32, (1, keys), 1)
    limits = [
        *([] if after is None else [position <= query_position + after]),
        *([] if before is None else [position >= query_position - before]),
        *([] if count is None else [position < count]),
    ]
    return functools.reduce(jnp.logical_and, limits) if limits else None


def masked(scores: jax.Array, mask: jax.Array | None, low: float = -jnp.inf) -> jax.Array:
    """Scores under a mask.

    Args:
        scores: (.., queries, keys).
        mask: broadcasts to them; of bool, True is visible; of floats, it is added. None for none.
        low: the score of keys that are not visible.
    """
    if mask is None:
        return scores
    if mask.dtype == bool:
        return jnp.where(mask, scores, low)
    return scores + mask.astype(scores.dtype)


def finite(top: jax.Array) -> jax.Array:
    """Maxima, with 0 for rows without a visible key, since -inf minus -inf is NaN."""
    return jnp.where(top == -jnp.inf, 0, top)


def softmax(scores: jax.Array, axis: int = -1) -> tuple[jax.Array, jax.Array]:
    """Softmax along an axis, and the logarithm of its denominator.

    Where all scores are minus infinity the weights are zeros and the logarithm is minus infinity;
    no gradient is NaN there.

    >>> jax.jit(softmax)(jnp.full(2, -jnp.inf))
    (Array([0., 0.], dtype=float32), Array(-inf, dtype=float32))
    """
    top = jnp.max(jax.lax.stop_gradient(scores), axis=axis, keepdims=True, initial=-jnp.inf)
    top = finite(top)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=axis, keepdims=True)
    log = jnp.squeeze(top + jnp.log(total), axis)
    return weights / jnp.where(total == 0, 1, total), log


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None = None,
    *,
    scale: float,
    causal: bool = False,
    gains: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of queries to keys and values.

    Args:
        q: (.., heads, queries, width).
        k: (.., key heads, keys, width); `heads` is a multiple of `key heads`.
        v: (.., key heads, keys, width of values).
        mask: broadcasts to (.., heads, queries, keys); of bool, True is visible; of floats, it is
            added to the scaled scores.
        scale: of the scores.
        causal: query `i` attends to keys `0..i`.
        gains: (.., heads, queries, keys), factors of the weights, as in dropout.

    Returns:
        (.., heads, queries, width of values), and (.., heads, queries), the logarithms of the sums
        of exponentials; both in at least float32. 0 for a query without a visible key.

    Example:
        >>> x = jnp.arange(3.0)[:, None]
        >>> causal = jax.jit(functools.partial(attend, scale=1.0, causal=True))
        >>> causal(0 * x, x, x)[0][:, 0].tolist()
        [0.0, 0.5, 1.0]
    """
    weights, log = softmax(_masked_scores(q, k, mask, scale, causal))
    return weighted(_dropped(weights, gains), v), log


def gradients(
    dout: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None = None,
    *,
    scale: float,
    causal: bool = False,
    gains: jax.Array | None = None,
    delta: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The gradients of `attend`.

    The weights are recomputed by the expressions of `attend`, with its arguments. If both are in
    one program XLA computes them once and keeps them; otherwise no residual of their size is kept.
    `dout` is the cotangent of the result; `delta`, `products(out, dout)`, is computed if missing.

    Returns:
        Gradients of queries, keys, values, and of the masked scores; in at least float32.
    """
    weights = softmax(_masked_scores(q, k, mask, scale, causal))[0]
    score_cotangents = weights * _dropped(scores(dout, v), gains)
    level = jnp.sum(score_cotangents, axis=-1, keepdims=True) if delta is None else delta[..., None]
    score_cotangents = score_cotangents - weights * level
    dq, dk = weighted(score_cotangents, k) * scale, weighted_back(score_cotangents, q, k) * scale
    return dq, dk, weighted_back(_dropped(weights, gains), dout, v), score_cotangents


def products(out: jax.Array, dout: jax.Array) -> jax.Array:
    """The products of a result and its cotangent, summed over the width, the last axis."""
    dtype = wide(out.dtype)
    return (out.astype(dtype) * dout.astype(dtype)).sum(-1)


def summed_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The gradient of an array that was broadcast from `shape` to the shape of `x`."""
    added = x.ndim - len(shape)
    broadcast = [n for n, extent in enumerate(shape, added) if extent == 1 != x.shape[n]]
    return jnp.sum(x, axis=(*range(added), *broadcast)).reshape(shape)


def _masked_scores(
    q: jax.Array, k: jax.Array, mask: jax.Array | None, scale: float, causal: bool
) -> jax.Array:
    rows = jax.lax.broadcasted_iota(jnp.int32, (q.shape[-2], 1), 0)
    result = masked(scores(q, k) * scale, visible(rows, k.shape[-2], after=0 if causal else None))
    return masked(result, mask)


def _dropped(weights: jax.Array, gains: jax.Array | None) -> jax.Array:
    return weights if gains is None else weights * gains


def _product(axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(axes, x, y, preferred_element_type=wide(x.dtype))


def _mixed(axes: str, weights: jax.Array, x: jax.Array) -> jax.Array:
    """A product with float32 weights, which accelerators multiply in the dtype of `x`.

    A CPU would compute it in float32 anyway, and rounding the weights first costs it time.
    """
    if weights.dtype == x.dtype:
        return _product(axes, weights, x)
    return jax.lax.platform_dependent(
        weights,
        x,
        cpu=lambda weights, x: _product(axes, weights, x.astype(wide(x.dtype))),
        default=lambda weights, x: _product(axes, weights.astype(x.dtype), x),
    )


def _is_grouped(rows: jax.Array, columns: jax.Array) -> bool:
    return rows.ndim > 2 and rows.shape[-3] != columns.shape[-3]


def _grouped(x: jax.Array, like: jax.Array) -> jax.Array:
    """(.., heads * group, rows, columns) as (.., heads, group, rows, columns)."""
    heads = like.shape[-3]
    return x.reshape(*x.shape[:-3], heads, x.shape[-3] // heads, *x.shape[-2:])


def _ungrouped(x: jax.Array) -> jax.Array:
    """(.., heads, group, rows, columns) as (.., heads * group, rows, columns)."""
    return x.reshape(*x.shape[:-4], x.shape[-4] * x.shape[-3], *x.shape[-2:])
