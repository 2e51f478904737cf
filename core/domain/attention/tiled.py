"""Attention of a block of queries to a block of keys, tile by tile, forward and backward.

No more scores exist at once than those of one tile. What is known of a row of scores so far is its
maximum, the sum of its exponentials under that maximum, and the sum of the values so weighted; the
next block of keys corrects all three. The gradient computes the scores again from their logarithmic
sum.

Source: Dao, FlashAttention-2 (https://arxiv.org/abs/2307.08691), algorithms 1 and 2; Milakov and
Gimelshein (https://arxiv.org/abs/1805.02867) for the running sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .sight import Sight, span, spans


class Running(NamedTuple):
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


def wide(dtype) -> jnp.dtype:
    """The dtype of sums: float32, or float64 for such."""
    return jnp.promote_types(dtype, jnp.float32)


def start(q: jax.Array, width: int) -> Running:
    """Rows of which nothing is known yet, for values of that width."""
    batch, queries, heads, group, _ = q.shape
    dtype = wide(q.dtype)
    rows = (batch, heads, group, queries)
    return Running(
        jnp.zeros((batch, queries, heads, group, width), dtype),
        jnp.full(rows, lowest(dtype)),
        jnp.zeros(rows, dtype),
    )


def lowest(dtype) -> jax.Array:
    """A number below all scores, with room to subtract."""
    return jnp.asarray(-0.7 * float(jnp.finfo(dtype).max), dtype)


def finish(running: Running) -> tuple[jax.Array, jax.Array]:
    """The result, and the logarithms of the sums; 0 and a huge number for rows that saw no key."""
    seen = running.total > 0
    total = jnp.where(seen, running.total, 1)
    log = jnp.where(seen, running.top + jnp.log(total), -lowest(total.dtype))
    return running.weighted / _columns(total), log


def attend(running: Running, q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight) -> Running:
    """Let a block of queries attend to one more block of keys.

    Args:
        running: the rows so far.
        q: [batch, queries, key heads, group, width].
        k: [batch, keys, key heads, width].
        v: [batch, keys, key heads, width of values].
        sight: what the one sees of the other.

    Returns:
        The rows with these keys.
    """
    tile, (queries, keys) = sight.setup.tile, sight.sizes

    def by_rows(i, running: Running) -> Running:
        rows = span(i, queries, tile)
        part_q = rows.cut(q, 1)
        part = Running(
            rows.cut(running.weighted, 1), rows.cut(running.top, 3), rows.cut(running.total, 3)
        )

        def by_columns(j, part: Running) -> Running:
            columns = span(j, keys, tile)
            lines = sight.lines(rows, columns)

            def more() -> Running:
                allowed = sight.allowed(rows, columns, lines)
                scores = _scores(part_q, columns.cut(k, 1), sight.setup.scale)
                kept = sight.kept(rows, columns)
                return _more(part, scores, columns.cut(v, 1), allowed, kept, sight.setup.rate)

            return _if_seen(lines, more, part)

        part = jax.lax.fori_loop(0, spans(keys, tile)[0], by_columns, part)
        return Running(
            rows.put(running.weighted, part.weighted, 1),
            rows.put(running.top, part.top, 3),
            rows.put(running.total, part.total, 3),
        )

    return jax.lax.fori_loop(0, spans(queries, tile)[0], by_rows, running)


def gradients(
    dq: jax.Array, given: Gradients, k: jax.Array, v: jax.Array, sight: Sight
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of a block of queries and one of keys.

    Args:
        dq: [batch, queries, key heads, group, width], of the queries so far.
        given: the queries, and what came back for them.
        k: [batch, keys, key heads, width].
        v: [batch, keys, key heads, width of values].
        sight: what the one sees of the other.

    Returns:
        `dq` with these keys, and the gradients of `k` and `v` from these queries.
    """
    tile, (queries, keys) = sight.setup.tile, sight.sizes

    def by_columns(j, state):
        dq, dk, dv = state
        columns = span(j, keys, tile)
        part_k, part_v = columns.cut(k, 1), columns.cut(v, 1)

        def by_rows(i, state):
            rows = span(i, queries, tile)
            lines = sight.lines(rows, columns)

            def more():
                dq, dk, dv = state
                part = Gradients(
                    rows.cut(given.q, 1),
                    rows.cut(given.out, 1),
                    rows.cut(given.log, 3),
                    rows.cut(given.delta, 3),
                )
                allowed = sight.allowed(rows, columns, lines)
                kept = sight.kept(rows, columns)
                more_q, more_k, more_v = _tile_gradients(part, part_k, part_v, allowed, kept, sight)
                return rows.add(dq, more_q, 1), dk + more_k, dv + more_v

            return _if_seen(lines, more, state)

        zeros = (jnp.zeros(part_k.shape, dq.dtype), jnp.zeros(part_v.shape, dq.dtype))
        number = spans(queries, tile)[0]
        dq, part_dk, part_dv = jax.lax.fori_loop(0, number, by_rows, (dq, *zeros))
        return dq, columns.add(dk, part_dk, 1), columns.add(dv, part_dv, 1)

    begin = (dq, jnp.zeros(k.shape, dq.dtype), jnp.zeros(v.shape, dq.dtype))
    return jax.lax.fori_loop(0, spans(keys, tile)[0], by_columns, begin)


def _if_seen(lines, more: Callable, else_):
    """Compute a tile only if some query of it sees some key of it."""
    if lines is None:
        return more()
    last, position = lines
    return jax.lax.cond(last.max() >= position.min(), more, lambda: else_)


def _scores(q, k, scale: float):
    return scale * jnp.einsum("bqhgw,bkhw->bhgqk", q, k, preferred_element_type=wide(q.dtype))


def _more(running: Running, scores, v, allowed, kept, rate: float) -> Running:
    if allowed is not None:
        scores = jnp.where(allowed, scores, lowest(scores.dtype))
    top = jnp.maximum(running.top, scores.max(-1))
    weights = jnp.exp(scores - top[..., None])
    if allowed is not None:
        weights = jnp.where(allowed, weights, 0)
    shrink = jnp.exp(running.top - top)
    total = running.total * shrink + weights.sum(-1)
    if kept is not None:
        weights = jnp.where(kept, weights / (1 - rate), 0)
    values = jnp.einsum(
        "bhgqk,bkhw->bqhgw", weights.astype(v.dtype), v, preferred_element_type=scores.dtype
    )
    return Running(running.weighted * _columns(shrink) + values, top, total)


def _tile_gradients(given: Gradients, k, v, allowed, kept, sight: Sight):
    setup, dtype = sight.setup, wide(given.q.dtype)
    weights = jnp.exp(_scores(given.q, k, setup.scale) - given.log[..., None])
    if allowed is not None:
        weights = jnp.where(allowed, weights, 0)
    dweights = jnp.einsum("bqhgw,bkhw->bhgqk", given.out, v, preferred_element_type=dtype)
    dropped = weights
    if kept is not None:
        dropped = jnp.where(kept, weights / (1 - setup.rate), 0)
        dweights = jnp.where(kept, dweights / (1 - setup.rate), 0)
    dscores = (setup.scale * weights * (dweights - given.delta[..., None])).astype(k.dtype)
    more = ("bhgqk,bkhw->bqhgw", "bhgqk,bqhgw->bkhw")
    dq = jnp.einsum(more[0], dscores, k, preferred_element_type=dtype)
    dk = jnp.einsum(more[1], dscores, given.q, preferred_element_type=dtype)
    dv = jnp.einsum(more[1], dropped.astype(v.dtype), given.out, preferred_element_type=dtype)
    return dq, dk, dv


def _columns(rows):
    """[batch, heads, group, queries] as [batch, queries, heads, group, 1]."""
    return jnp.moveaxis(rows, -1, 1)[..., None]
