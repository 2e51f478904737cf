"""Continuous batching of a Llama in JAX: a cache of slots, two functions under `jax.jit`, a loop.

What a user of JAX writes: parameters and cache are sharded, the cache and the state of the slots
are donated, and tokens are read while the next step runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.models import llama

from .layers import Params, rms_norm

State = dict[str, Any]


class SlotLoop:
    """Serves greedy requests in slots.

    Args:
        params: of a `LlamaForCausalLM`, by torch's names, on the mesh.
        size: of the model.
        mesh: has the axes "data", for slots, and "model", for heads.
        slots: sequences that are decoded together.
        max_length: of a sequence.
        buckets: lengths of prompts, rising.
    """

    def __init__(
        self,
        params: Params,
        size: llama.Size,
        mesh: Mesh,
        slots: int,
        max_length: int,
        buckets: Sequence[int],
    ):
        """See the class."""
        self._params, self._buckets, self._slots = params, buckets, slots
        shape = (slots, size.kv_heads, max_length, size.width // size.heads)
        self._prefill = jax.jit(_Model(size).prefill, donate_argnums=1)
        self._decode = jax.jit(_Model(size).decode, donate_argnums=1)
        split = NamedSharding(mesh, P("data", "model"))
        replicated = NamedSharding(mesh, P())

        def zeros() -> list[jax.Array]:
            return [jax.device_put(jnp.zeros(shape), split) for _ in range(size.layers)]

        self._state: State = {
            "k": zeros(),
            "v": zeros(),
            "tokens": jax.device_put(jnp.zeros(slots, jnp.int32), replicated),
            "positions": jax.device_put(jnp.zeros(slots, jnp.int32), replicated),
        }

    def serve(self, requests: Sequence[tuple[Sequence[int], int]]) -> list[list[int]]:
        """The new tokens of each request.

        Args:
            requests: prompts, and how many new tokens each gets.
        """
        waiting = deque(range(len(requests)))
        outputs: list[list[int]] = [[] for _ in requests]
        slots: list[int | None] = [None] * self._slots
        left = [0] * self._slots
        unread: deque[tuple[jax.Array, list[tuple[int, int]]]] = deque()
        while True:
            for row in range(self._slots):
                if slots[row] is None and waiting:
                    request = waiting.popleft()
                    prompt, new = requests[request]
                    unread.append((self._start(row, prompt), [(0, request)]))
                    slots[row], left[row] = (request, new - 1) if new > 1 else (None, 0)
            owners = [(row, slot) for row, slot in enumerate(slots) if slot is not None]
            if owners:
                tokens, self._state = self._decode(self._params, self._state)
                unread.append((tokens, owners))
                for row, _ in owners:
                    left[row] -= 1
                    if not left[row]:
                        slots[row] = None
            while len(unread) > bool(owners):
                tokens, read = unread.popleft()
                values = np.asarray(tokens)
                for row, request in read:
                    outputs[request].append(int(values[row]))
            if not (waiting or owners):
                return outputs

    def _start(self, row: int, prompt: Sequence[int]) -> jax.Array:
        bucket = next(size for size in self._buckets if size >= len(prompt))
        ids = np.zeros((1, bucket), np.int32)
        ids[0, : len(prompt)] = prompt
        token, self._state = self._prefill(self._params, self._state, ids, row, len(prompt))
        return token


class _Model:
    """The two functions that run on the device.

    Args:
        size: of the model.
    """

    def __init__(self, size: llama.Size):
        """See the class."""
        self._size = size

    def prefill(self, params: Params, state: State, ids: Any, row: Any, length: Any):
        """Store a prompt in a slot; its next token."""
        bucket = ids.shape[1]
        positions = jnp.arange(bucket)[None]
        state = {**state, "k": list(state["k"]), "v": list(state["v"])}

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            for name, new in (("k", k), ("v", v)):
                stored = state[name][layer]
                state[name][layer] = stored.at[row, :, :bucket].set(new[0].swapaxes(0, 1))
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)

        x = self._layers(params, ids, positions, attend)
        x = jax.lax.dynamic_slice_in_dim(x, length - 1, 1, axis=1)[:, 0]
        token = jnp.argmax(self._head(params, x), -1)
        state["tokens"] = state["tokens"].at[row].set(token[0])
        state["positions"] = state["positions"].at[row].set(length)
        return token, state

    def decode(self, params: Params, state: State):
        """A token for each slot."""
        positions = state["positions"]
        rows = jnp.arange(positions.shape[0])
        state = {**state, "k": list(state["k"]), "v": list(state["v"])}

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            for name, new in (("k", k), ("v", v)):
                stored = state[name][layer]
                state[name][layer] = stored.at[rows, :, positions].set(new[:, 0])
            keys, values = (state[name][layer].swapaxes(1, 2) for name in "kv")
            seen = jnp.arange(keys.shape[1]) <= positions[:, None]
            return jax.nn.dot_product_attention(q, keys, values, mask=seen[:, None, None])

        x = self._layers(params, state["tokens"][:, None], positions[:, None], attend)
        tokens = jnp.argmax(self._head(params, x[:, 0]), -1)
        last = state["k"][0].shape[2] - 1
        return tokens, {**state, "tokens": tokens, "positions": jnp.minimum(positions + 1, last)}

    def _layers(self, params: Params, ids: Any, positions: Any, attend: Any) -> jax.Array:
        x = params["model.embed_tokens.weight"][ids]
        for layer in range(self._size.layers):
            name = f"model.layers.{layer}"
            h = rms_norm(params, f"{name}.input_layernorm", x, llama.EPSILON)
            q, k, v = (self._heads(params, f"{name}.self_attn.{c}_proj", h) for c in "qkv")
            y = attend(layer, _rotated(q, positions), _rotated(k, positions), v)
            x = x + y.reshape(x.shape) @ params[f"{name}.self_attn.o_proj.weight"].T
            h = rms_norm(params, f"{name}.post_attention_layernorm", x, llama.EPSILON)
            gate, up = (h @ params[f"{name}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
            x = x + (jax.nn.silu(gate) * up) @ params[f"{name}.mlp.down_proj.weight"].T
        return x

    def _heads(self, params: Params, name: str, h: jax.Array) -> jax.Array:
        width = self._size.width // self._size.heads
        return (h @ params[f"{name}.weight"].T).reshape(*h.shape[:2], -1, width)

    def _head(self, params: Params, x: jax.Array) -> jax.Array:
        return rms_norm(params, "model.norm", x, llama.EPSILON) @ params["lm_head.weight"].T


def _rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    features = x.shape[3]
    rate = llama.THETA ** -(jnp.arange(0, features, 2) / features)
    angle = positions[:, :, None] * rate
    cos, sin = (jnp.tile(f(angle), 2)[:, :, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    real, imaginary = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-imaginary, real], -1) * sin
