"""Greedy decoding of a Llama, written in JAX by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso


class Decoding:
    """A Llama's step over a static cache, jitted, with the cache donated.

    Args:
        model: a `LlamaForCausalLM` on the mesh, whose weights are used as they are.
        mesh: with axes "data" and "model".
        rows: of a batch.
        size: tokens that the cache holds for each row.
    """

    def __init__(self, model: Any, mesh: jax.sharding.Mesh, rows: int, size: int):
        """See the class."""
        config = model.config
        self._weights = {name: iso.to_jax(p.detach()) for name, p in model.named_parameters()}
        self._layers, self._eps = config.num_hidden_layers, config.rms_norm_eps
        self._heads, self._groups = config.num_attention_heads, config.num_key_value_heads
        self._head = config.hidden_size // config.num_attention_heads
        self._shape = (rows, size, self._groups, self._head)
        self._cache = NamedSharding(mesh, P("data", None, "model", None))
        self._tokens = NamedSharding(mesh, P("data"))
        self._step = jax.jit(self._forward, donate_argnums=1)

    def generate(self, ids: np.ndarray, new: int) -> np.ndarray:
        """The prompt and the likeliest tokens after it.

        Args:
            ids: int32 of shape (rows, length).
            new: how many tokens.
        """
        cache = [
            tuple(jnp.zeros(self._shape, device=self._cache) for _ in range(2))
            for _ in range(self._layers)
        ]
        tokens = jax.device_put(ids, self._tokens)
        cache, tokens = self._step(self._weights, cache, tokens, 0)
        results = [np.asarray(tokens)]
        for position in range(ids.shape[1], ids.shape[1] + new - 1):
            cache, tokens = self._step(self._weights, cache, tokens, position)
            # Two programs at a time wait for each other's devices where few cores simulate many.
            results.append(np.asarray(tokens))
        return np.concatenate([ids, *results], axis=1)

    def _norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + self._eps) * weight

    def _rotated(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        angles = positions[:, None] / 10000.0 ** (jnp.arange(0, self._head, 2) / self._head)
        angles = jnp.concatenate([angles, angles], -1)[None, :, None]
        left, right = jnp.split(x, 2, -1)
        return x * jnp.cos(angles) + jnp.concatenate([-right, left], -1) * jnp.sin(angles)

    def _attention(self, q: Any, keys: Any, values: Any, positions: jax.Array) -> jax.Array:
        rows, count = q.shape[:2]
        q = q.reshape(rows, count, self._groups, -1, self._head)
        scores = jnp.einsum("bskgd,bmkd->bkgsm", q, keys) / np.sqrt(self._head)
        seen = jnp.arange(keys.shape[1]) <= positions[:, None]
        shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
        return jnp.einsum("bkgsm,bmkd->bskgd", shares, values).reshape(rows, count, -1)

    def _forward(self, weights: Any, cache: Any, tokens: jax.Array, start: Any) -> Any:
        rows, count = tokens.shape
        positions = start + jnp.arange(count)
        x = weights["model.embed_tokens.weight"][tokens]
        written = []
        for layer in range(self._layers):
            w = lambda name, at=f"model.layers.{layer}.": weights[f"{at}{name}.weight"]  # noqa: E731
            split = lambda y: y.reshape(rows, count, -1, self._head)  # noqa: E731
            y = self._norm(x, w("input_layernorm"))
            q, k, v = (split(y @ w(f"self_attn.{name}_proj").T) for name in "qkv")
            at = (0, start, 0, 0)
            keys = jax.lax.dynamic_update_slice(cache[layer][0], self._rotated(k, positions), at)
            values = jax.lax.dynamic_update_slice(cache[layer][1], v, at)
            written.append((keys, values))
            y = self._attention(self._rotated(q, positions), keys, values, positions)
            x = x + y @ w("self_attn.o_proj").T
            y = self._norm(x, w("post_attention_layernorm"))
            gate = jax.nn.silu(y @ w("mlp.gate_proj").T)
            x = x + (gate * (y @ w("mlp.up_proj").T)) @ w("mlp.down_proj").T
        logits = self._norm(x[:, -1], weights["model.norm.weight"]) @ weights["lm_head.weight"].T
        return written, logits.argmax(-1).astype(jnp.int32)[:, None]
