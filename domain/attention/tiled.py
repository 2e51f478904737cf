"""Attention of a block of queries to a block of keys, tile by tile, forward and backward.

No more scores exist at once than those of one tile. What is known of a row of scores so far is its
maximum, the sum of its exponentials under that maximum, and the sum of the values so weighted; the
next block of keys corrects all three. The gradient computes the scores again from their logarithmic
sum, so where the scores are so large (10^7 in float32) that the logarithm of a count is lost beside
them, as under a mask of the lowest finite number, the gradient of such rows is too large.

Source: Dao, FlashAttention-2 (https://arxiv.org/abs/2307.08691), algorithms 1 and 2; Milakov and
Gimelshein (https://arxiv.org/abs/1805.02867) for the running sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from isoshard.core.nn.dot_product_attention import finite, masked, wide
from isoshard.core.nn.dropout import dropped

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


class Gradients(NamedTuple):
    """The queries with what came back for them.

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
    """Rows of which nothing is known yet, for values of that width."""
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
    seen = running.total > 0
    total = jnp.where(seen, running.total, 1)
    log = jnp.where(seen, running.top + jnp.log(total), -jnp.inf)
    return running.weighted / columns_of(total), log


def attend(
    running: RunningSoftmax, q: jax.Array, k: jax.Array, v: jax.Array, sight: Visibility
) -> RunningSoftmax:
    """Let a block of queries attend to one more block of keys."""
    tile, (queries, keys) = sight.setup.tile, sight.sizes

    def by_rows(i, running: RunningSoftmax) -> RunningSoftmax:
        rows = span(i, queries, tile)
        part_q = rows.cut(q, 1)
        part = RunningSoftmax(
            rows.cut(running.weighted, 1), rows.cut(running.top, 3), rows.cut(running.total, 3)
        )

        def by_columns(j, part: RunningSoftmax) -> RunningSoftmax:
            columns = span(j, keys, tile)
            lines = sight.lines(rows, columns)

            def more() -> RunningSoftmax:
                scores = _scores(part_q, columns.cut(k, 1), rows, columns, lines, sight)
                kept = sight.kept(rows, columns)
                return _more(part, scores, columns.cut(v, 1), kept, sight.setup.rate)

            return _if_seen(lines, more, part)

        part = jax.lax.fori_loop(0, spans(keys, tile)[0], by_columns, part)
        return RunningSoftmax(
            rows.put(running.weighted, part.weighted, 1),
            rows.put(running.top, part.top, 3),
            rows.put(running.total, part.total, 3),
        )

    return jax.lax.fori_loop(0, spans(queries, tile)[0], by_rows, running)


class Slopes(NamedTuple):
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
    so_far: Slopes,
    given: Gradients,
    k: jax.Array,
    v: jax.Array,
    sight: Visibility,
    part: tuple[int, int] = (0, 1),
) -> Slopes:
    """Gradients of a block of queries and one of keys."""
    tile, (queries, keys) = sight.setup.tile, sight.sizes

    def by_columns(j, state: Slopes) -> Slopes:
        columns = span(j, keys, tile)
        part_k, part_v = columns.cut(k, 1), columns.cut(v, 1)

        def by_rows(i, state: Slopes) -> Slopes:
            rows = span(i, queries, tile)
            lines = sight.lines(rows, columns)

            def more() -> Slopes:
                part = Gradients(
                    rows.cut(given.q, 1),
                    rows.cut(given.out, 1),
                    rows.cut(given.log, 3),
                    rows.cut(given.delta, 3),
                )
                scores = _scores(part.q, part_k, rows, columns, lines, sight)
                kept = sight.kept(rows, columns)
                found = _tile_gradients(part, part_k, part_v, scores, kept, sight)
                mask = state.mask
                if mask is not None:
                    mask = sight.put_slopes(mask, rows, columns, found[3])
                return Slopes(
                    rows.add(state.q, found[0], 1), state.k + found[1], state.v + found[2], mask
                )

            return _if_seen(lines, more, state)

        dtype = so_far.q.dtype
        begin = state._replace(k=jnp.zeros(part_k.shape, dtype), v=jnp.zeros(part_v.shape, dtype))
        found = jax.lax.fori_loop(0, spans(queries, tile)[0], by_rows, begin)
        return found._replace(
            k=columns.add(state.k, found.k, 1), v=columns.add(state.v, found.v, 1)
        )

    number, (which, parts) = spans(keys, tile)[0], part
    first, end = number * which // parts, number * (which + 1) // parts
    return jax.lax.fori_loop(first, end, by_columns, so_far)


def _if_seen(lines, more: Callable, else_):
    """Compute a tile only if some query of it sees some key of it."""
    if lines is None:
        return more()
    last, position = lines
    return jax.lax.cond(last.max() >= position.min(), more, lambda: else_)


def _scores(q, k, rows: Span, columns: Span, lines, sight: Visibility):
    """The scores of a tile, minus infinity where they do not count."""
    scores = jnp.einsum("bqhgw,bkhw->bhgqk", q, k, preferred_element_type=wide(q.dtype))
    scores = masked(sight.setup.scale * scores, sight.added(rows, columns))
    return masked(scores, sight.allowed(rows, columns, lines))


def _more(running: RunningSoftmax, scores, v, kept, rate: float) -> RunningSoftmax:
    top = jnp.maximum(running.top, scores.max(-1))
    level = finite(top)
    weights = jnp.exp(scores - level[..., None])
    shrink = jnp.exp(running.top - level)
    total = running.total * shrink + weights.sum(-1)
    weights = dropped(weights, kept, rate).astype(v.dtype)
    values = jnp.einsum("bhgqk,bkhw->bqhgw", weights, v, preferred_element_type=scores.dtype)
    return RunningSoftmax(running.weighted * columns_of(shrink) + values, top, total)


def _tile_gradients(given: Gradients, k, v, scores, kept, sight: Visibility):
    """Of queries, keys, values and scores."""
    setup, dtype = sight.setup, wide(given.q.dtype)
    weights = jnp.exp(scores - finite(given.log)[..., None])
    dweights = jnp.einsum("bqhgw,bkhw->bhgqk", given.out, v, preferred_element_type=dtype)
    dweights = dropped(dweights, kept, setup.rate)
    slopes = weights * (dweights - given.delta[..., None])
    dscores = (setup.scale * slopes).astype(k.dtype)
    more = ("bhgqk,bkhw->bqhgw", "bhgqk,bqhgw->bkhw")
    dq = jnp.einsum(more[0], dscores, k, preferred_element_type=dtype)
    dk = jnp.einsum(more[1], dscores, given.q, preferred_element_type=dtype)
    weights = dropped(weights, kept, setup.rate).astype(v.dtype)
    dv = jnp.einsum(more[1], weights, given.out, preferred_element_type=dtype)
    return dq, dk, dv, slopes


def columns_of(rows: jax.Array) -> jax.Array:
    """[batch, heads, group, queries] as [batch, queries, heads, group, 1]."""
    return jnp.moveaxis(rows, -1, 1)[..., None]
