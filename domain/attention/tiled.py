"""Attention of a block of queries to a block of keys, tile by tile, forward and backward.

No more scores exist at once than those of one tile. What is known of a row of scores so far is its
maximum, the sum of its exponentials under that maximum, and the sum of the values so weighted; the
next block of keys corrects all three. The gradient computes the scores again from their logarithmic
sum, so where the scores are so large (10^7 in float32) that the logarithm of a count is rounded
away, as under a mask of the lowest finite number, the gradient of such rows is too large.

Source: Dao, FlashAttention-2 (https://arxiv.org/abs/2307.08691), algorithms 1 and 2; Milakov and
Gimelshein (https://arxiv.org/abs/1805.02867) for the running sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from isoshard.core.kit import dot_product_attention_wide as wide
from isoshard.core.kit import dropped, finite, masked

from .masking import Span, Visibility, span, spans


class RunningSoftmax(NamedTuple):
    """The rows of scores so far.

    Attributes:
        weighted: [batch, queries, key heads, group, width], values by their exponentials.
        top: [batch, key heads, group, queries], maxima.
        total: likewise, sums of exponentials.
    """

    weighted: jax.Array
    top: jax.Array
    total: jax.Array


class QueryResiduals(NamedTuple):
    """The queries, and the residuals of their gradients.

    Attributes:
        q: [batch, queries, key heads, group, width].
        out: of the result, likewise.
        log: [batch, key heads, group, queries], logarithms of the sums of exponentials.
        delta: likewise, the products of result and its gradient.
    """

    q: jax.Array
    out: jax.Array
    log: jax.Array
    delta: jax.Array


def start(q: jax.Array, width: int) -> RunningSoftmax:
    """The initial state, for values of that width."""
    batch, queries, heads, group, _ = q.shape
    dtype = wide(q.dtype)
    rows = (batch, heads, group, queries)
    return RunningSoftmax(
        jnp.zeros((batch, queries, heads, group, width), dtype),
        jnp.full(rows, -jnp.inf, dtype),
        jnp.zeros(rows, dtype),
    )


def finish(running: RunningSoftmax) -> tuple[jax.Array, jax.Array]:
    """The result, and the logarithms of the sums; 0 and minus infinity for rows that saw no key."""
    has_keys = running.total > 0
    total = jnp.where(has_keys, running.total, 1)
    log = jnp.where(has_keys, running.top + jnp.log(total), -jnp.inf)
    return running.weighted / columns_of(total), log


def attend(
    running: RunningSoftmax, q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility
) -> RunningSoftmax:
    """Let a block of queries attend to one more block of keys."""
    tile, (queries, keys) = visibility.setup.tile, visibility.sizes

    def by_rows(i, running: RunningSoftmax) -> RunningSoftmax:
        rows = span(i, queries, tile)
        tile_q = rows.slice(q, 1)
        state = RunningSoftmax(
            rows.slice(running.weighted, 1),
            rows.slice(running.top, 3),
            rows.slice(running.total, 3),
        )

        def by_columns(j, state: RunningSoftmax) -> RunningSoftmax:
            columns = span(j, keys, tile)

            def more(allowed: jax.Array | None) -> RunningSoftmax:
                added = visibility.added(rows, columns)
                scores = _scores(tile_q, columns.slice(k, 1), added, allowed, visibility)
                keep_mask = visibility.keep_mask(rows, columns)
                return _more(state, scores, columns.slice(v, 1), keep_mask, visibility.setup.rate)

            return _if_visible(visibility, rows, columns, more, state)

        state = jax.lax.fori_loop(0, spans(keys, tile)[0], by_columns, state)
        return RunningSoftmax(
            rows.put(running.weighted, state.weighted, 1),
            rows.put(running.top, state.top, 3),
            rows.put(running.total, state.total, 3),
        )

    return jax.lax.fori_loop(0, spans(queries, tile)[0], by_rows, running)


class TileGradients(NamedTuple):
    """Gradients so far.

    Attributes:
        q: [batch, queries, key heads, group, width].
        k: [batch, keys, key heads, width].
        v: [batch, keys, key heads, width of values].
        mask: of the mask's shape; None if it has none.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    mask: jax.Array | None


def gradients(
    so_far: TileGradients,
    residuals: QueryResiduals,
    k: jax.Array,
    v: jax.Array,
    visibility: Visibility,
    fraction: tuple[int, int] = (0, 1),
) -> TileGradients:
    """Gradients of a block of queries and one of keys."""
    tile, (queries, keys) = visibility.setup.tile, visibility.sizes

    def by_columns(j, state: TileGradients) -> TileGradients:
        columns = span(j, keys, tile)
        tile_k, tile_v = columns.slice(k, 1), columns.slice(v, 1)

        def by_rows(i, state: TileGradients) -> TileGradients:
            rows = span(i, queries, tile)

            def more(allowed: jax.Array | None) -> TileGradients:
                rows_of = QueryResiduals(
                    rows.slice(residuals.q, 1),
                    rows.slice(residuals.out, 1),
                    rows.slice(residuals.log, 3),
                    rows.slice(residuals.delta, 3),
                )
                added = visibility.added(rows, columns)
                scores = _scores(rows_of.q, tile_k, added, allowed, visibility)
                keep_mask = visibility.keep_mask(rows, columns)
                grads = _tile_gradients(rows_of, tile_k, tile_v, scores, keep_mask, visibility)
                mask = state.mask
                if mask is not None:
                    mask = visibility.add_mask_gradient(mask, rows, columns, grads[3])
                return TileGradients(
                    rows.add(state.q, grads[0], 1), state.k + grads[1], state.v + grads[2], mask
                )

            return _if_visible(visibility, rows, columns, more, state)

        dtype = so_far.q.dtype
        begin = state._replace(k=jnp.zeros(tile_k.shape, dtype), v=jnp.zeros(tile_v.shape, dtype))
        grads = jax.lax.fori_loop(0, spans(queries, tile)[0], by_rows, begin)
        return grads._replace(
            k=columns.add(state.k, grads.k, 1), v=columns.add(state.v, grads.v, 1)
        )

    tiles, (index, count) = spans(keys, tile)[0], fraction
    first, end = tiles * index // count, tiles * (index + 1) // count
    return jax.lax.fori_loop(first, end, by_columns, so_far)


def _if_visible(visibility: Visibility, rows: Span, columns: Span, more: Callable, else_):
    """Compute a tile only if some query of it sees some key of it.

    `more` gets which scores count. Order and lengths are compared first, without a mask.
    """
    bounds = visibility.bounds(rows, columns)

    def of_mask():
        allowed = visibility.allowed(rows, columns, bounds)
        if not visibility.has_bool_mask or allowed is None:
            return more(allowed)
        return jax.lax.cond(allowed.any(), lambda: more(allowed), lambda: else_)

    if bounds is None:
        return of_mask()
    last, position = bounds
    return jax.lax.cond(last.max() >= position.min(), of_mask, lambda: else_)


def _scores(q, k, added, allowed, visibility: Visibility):
    """The scores of a tile, minus infinity where they do not count."""
    scores = jnp.einsum("bqhgw,bkhw->bhgqk", q, k, preferred_element_type=wide(q.dtype))
    return masked(masked(visibility.setup.scale * scores, added), allowed)


def _more(running: RunningSoftmax, scores, v, keep_mask, rate: float) -> RunningSoftmax:
    top = jnp.maximum(running.top, scores.max(-1))
    level = finite(top)
    weights = jnp.exp(scores - level[..., None])
    shrink = jnp.exp(running.top - level)
    total = running.total * shrink + weights.sum(-1)
    weights = dropped(weights, keep_mask, rate).astype(v.dtype)
    values = jnp.einsum("bhgqk,bkhw->bqhgw", weights, v, preferred_element_type=scores.dtype)
    return RunningSoftmax(running.weighted * columns_of(shrink) + values, top, total)


def _tile_gradients(residuals: QueryResiduals, k, v, scores, keep_mask, visibility: Visibility):
    """Of queries, keys, values and scores."""
    setup, dtype = visibility.setup, wide(residuals.q.dtype)
    weights = jnp.exp(scores - finite(residuals.log)[..., None])
    dweights = jnp.einsum("bqhgw,bkhw->bhgqk", residuals.out, v, preferred_element_type=dtype)
    dweights = dropped(dweights, keep_mask, setup.rate)
    gradient = weights * (dweights - residuals.delta[..., None])
    dscores = (setup.scale * gradient).astype(k.dtype)
    more = ("bhgqk,bkhw->bqhgw", "bhgqk,bqhgw->bkhw")
    dq = jnp.einsum(more[0], dscores, k, preferred_element_type=dtype)
    dk = jnp.einsum(more[1], dscores, residuals.q, preferred_element_type=dtype)
    weights = dropped(weights, keep_mask, setup.rate).astype(v.dtype)
    dv = jnp.einsum(more[1], weights, residuals.out, preferred_element_type=dtype)
    return dq, dk, dv, gradient


def columns_of(rows: jax.Array) -> jax.Array:
    """[batch, heads, group, queries] as [batch, queries, heads, group, 1]."""
    return jnp.moveaxis(rows, -1, 1)[..., None]
