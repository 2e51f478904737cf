"""Which attention weights are dropped: by their place in the whole, so alike on every mesh.

The bits of a weight are a hash of the key, the sample, the head and the two positions. So no device
needs what another drew, and a ring, an all-to-all and one device drop the same weights.

>>> one = jnp.arange(1)
>>> keep(jax.random.key(0), 0.5, one, one, jnp.arange(2), jnp.arange(6))[0, 0]
Array([[False, False, False,  True, False, False],
       [False, False, False, False, False,  True]], dtype=bool)
>>> keep(jax.random.key(0), 0.5, one, one, jnp.array([1]), jnp.arange(3, 6))[0, 0]
Array([[False, False,  True]], dtype=bool)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


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
        samples: int32[b], numbers in the whole batch.
        heads: int32[h], numbers among all heads of the queries.
        queries: int32[q], positions.
        keys: int32[k], positions.

    Returns:
        bool[b, h, q, k]; True stays.
    """
    folded = jax.vmap(jax.random.fold_in, (None, 0))
    rows = folded(key, samples)
    rows = jax.vmap(folded, (0, None))(rows, heads)
    rows = jax.vmap(jax.vmap(folded, (0, None)), (0, None))(rows, queries)
    cells = jax.vmap(jax.vmap(jax.vmap(folded, (0, None)), (0, None)), (0, None))(rows, keys)
    bits = jax.random.key_data(cells)[..., 0]
    return bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
