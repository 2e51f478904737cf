"""The next token of each slot: greedy, or drawn with a temperature, top-k and nucleus limits.

A draw depends on the request's seed and the token's position alone, not on the slot or on who else
is served, so a request with a seed gives the same tokens in any company.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..interop.calling_jax import TorchFunction


def _next_tokens(
    logits: jax.Array,
    temperature: jax.Array,
    top_p: jax.Array,
    top_k: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    logits = logits.astype(jnp.float32)
    greedy = jnp.argmax(logits, axis=-1)

    def draw() -> jax.Array:
        scaled = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
        limited = jnp.any((top_p < 1) | (top_k > 0))
        scaled = jax.lax.cond(limited, lambda: _limit(scaled, top_p, top_k), lambda: scaled)
        # the largest of logits with Gumbel noise is a draw of the softmax
        noise = jax.vmap(lambda seed, position: _noise(seed, position, logits.shape[-1]))
        return jnp.argmax(scaled + noise(seeds, positions), axis=-1)

    drawn = jax.lax.cond(jnp.any(temperature > 0), draw, lambda: greedy)
    return jnp.where(temperature > 0, drawn, greedy).astype(jnp.int32)  # also in 64-bit mode


def _noise(seed: jax.Array, position: jax.Array, size: int) -> jax.Array:
    return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (size,))


def _limit(scaled: jax.Array, top_p: jax.Array, top_k: jax.Array) -> jax.Array:
    """Logits of tokens that may be drawn, others minus infinity; top-k first, as transformers."""
    size = scaled.shape[-1]
    falling = jnp.sort(scaled, axis=-1, descending=True)
    ranks = jnp.arange(size)
    kept = ranks < jnp.where(top_k > 0, jnp.minimum(top_k, size), size)[:, None]
    probabilities = jax.nn.softmax(jnp.where(kept, falling, -jnp.inf), axis=-1)
    kept &= jnp.cumsum(probabilities, axis=-1) - probabilities < top_p[:, None]
    kept = kept.at[:, 0].set(True)
    smallest = jnp.take_along_axis(falling, jnp.sum(kept, axis=-1, keepdims=True) - 1, axis=-1)
    return jnp.where(scaled >= smallest, scaled, -jnp.inf)


next_tokens = TorchFunction(_next_tokens, "next_tokens")
"""A function of torch tensors on the `jax` device.

Args: logits `[slots, words]`, and for each slot `temperature` (0: greedy), `top_p` (1: all), both
floats, `top_k` (0: all), `seeds` and `positions`, int32. Returns int32 `[slots]`.
"""
