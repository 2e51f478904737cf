"""Attention dropout by the global position of each weight, so it is equal on every mesh.

The bits of a weight are a hash of the key, the sample, the head and the two positions. So no device
needs what another drew, and a ring, an all-to-all and one device drop the same weights.

>>> import numpy as np
>>> drawn = jax.jit(keep, static_argnums=1)
>>> key, one = jax.random.key(0), np.arange(1)
>>> drawn(key, 0.5, one, one, np.arange(2), np.arange(6))[0, 0]
Array([[False, False, False,  True, False, False],
       [False, False, False, False, False,  True]], dtype=bool)
>>> drawn(key, 0.5, one, one, np.array([1]), np.arange(3, 6))[0, 0]
Array([[False, False,  True]], dtype=bool)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

WORDS = "threefry2x32"
"""The implementation of keys that are given as two words."""


def keep(
    key: jax.Array,
    rate: float,
    samples: jax.Array,
    heads: jax.Array,
    queries: jax.Array,
    keys: jax.Array,
) -> jax.Array:
    """Say which weights stay.

    Args:
        key: of `jax.random`, typed.
        rate: the share that is dropped, at least 0 and below 1.
        samples: int32[b], indices in the global batch.
        heads: int32[h], indices among all heads of the queries.
        queries: int32[q], positions.
        keys: int32[k], positions.

    Returns:
        bool[b, h, q, k]; True is kept.
    """
    folded = jax.vmap(jax.random.fold_in, (None, 0))
    rows = folded(key, samples)
    rows = jax.vmap(folded, (0, None))(rows, heads)
    rows = jax.vmap(jax.vmap(folded, (0, None)), (0, None))(rows, queries)
    cells = jax.vmap(jax.vmap(jax.vmap(folded, (0, None)), (0, None)), (0, None))(rows, keys)
    bits = jax.random.key_data(cells)[..., 0]
    return bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))


def words_of(key: jax.Array) -> jax.Array:
    """Two words, uint32[2], drawn with a key of any implementation; `key_of` makes a key of them.

    >>> words = words_of(jax.random.key(0))
    >>> words.shape, key_of(words).shape
    ((2,), ())
    """
    return jax.random.bits(key, (2,), jnp.uint32)


def key_of(words: jax.Array) -> jax.Array:
    """The key that two words, uint32[2], are."""
    return jax.random.wrap_key_data(words, impl=WORDS)


def gains(
    words: jax.Array | None,
    rate: float,
    shape: Sequence[int],
    indices: tuple[jax.Array, jax.Array] | None = None,
) -> Any:
    """The factors of the weights of complete sequences.

    Args:
        words: uint32[2], the key; None without dropout.
        rate: the share that is dropped.
        shape: (.., heads, queries, keys), of the weights; two axes are without heads.
        indices: of the samples and heads among all there are, int32[b] and int32[h]; by default
            these are all.

    Returns:
        float32 of that shape: 0, or what makes up for the weights that are dropped; None without
        dropout.

    Example:
        >>> jax.jit(lambda key: gains(words_of(key), 0.5, (2, 3)))(jax.random.key(0))
        Array([[2., 2., 0.],
               [2., 0., 0.]], dtype=float32)
    """
    if words is None:
        return None
    *lead, heads, queries, keys = (1, *shape) if len(shape) == 2 else shape
    counts = (math.prod(lead), heads, queries, keys)
    samples, each, *positions = (jnp.arange(count, dtype=jnp.int32) for count in counts)
    samples, each = indices or (samples, each)
    kept_weights = keep(key_of(words), rate, samples, each, *positions)
    return dropped(jnp.ones(shape, jnp.float32), kept_weights.reshape(shape), rate)


def dropped(weights: jax.Array, kept: jax.Array | None, rate: float) -> jax.Array:
    """Weights, or their gradients, after dropout: zeros, or scaled up.

    >>> dropped(jnp.ones(2), jnp.array([True, False]), 0.5)
    Array([2., 0.], dtype=float32)
    """
    return weights if kept is None else jnp.where(kept, weights / (1 - rate), 0)
