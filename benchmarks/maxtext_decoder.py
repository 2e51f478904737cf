"""MaxText's decoder as one writes it in JAX, at the sizes of its published v5e runs, to plan with.

A Llama-shaped decoder with as many heads of keys as of queries: float32 parameters, products in
bfloat16, layers as one scan that computes them again in the backward pass, attention by JAX's
splash kernel (Pallas) on each chip's own sequences and heads, AdamW behind a clipped norm. Layouts
are MaxText's: parameters split over "fsdp" and "tensor", the batch over "data" and "fsdp", what
flows between layers over the batch and "tensor".

Sources, all of https://github.com/AI-Hypercomputer/maxtext: batch, mesh and what is computed again
from MaxText/configs/v5e/16b.sh, 32b.sh, 64b.sh, 128b.sh; sizes, layouts and optimizer from
MaxText/configs/base.yml, scaled by `get_individual_scales` of pyconfig.py. The code is not theirs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh, PartitionSpec

import isoshard as iso

P = PartitionSpec
Tree = dict[str, Any]

SEQUENCE, VOCABULARY, HEAD = 2048, 32_000, 128
BATCH = ("data", "fsdp")
STREAM = P(BATCH, None, "tensor")
"""How what flows between layers lies: sequences, positions, features."""

KEPT = ("query_key_value", "out", "gate_up", "down")
"""Products that the policy "minimal_offloaded" keeps, in the host's memory."""


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A published configuration.

    Attributes:
        width: of the residual stream.
        heads: of attention, of `HEAD` each.
        hidden: of the gated MLP.
        layers: how many.
        batch: sequences of `SEQUENCE` tokens a chip.
        tensor: chips that share one layer's products; the rest of a slice is FSDP.
        recomputes: the backward pass computes each layer again; else products are kept on hosts.
        fused: query, key and value are one product, and gate and up another.
    """

    width: int
    heads: int
    hidden: int
    layers: int
    batch: int
    tensor: int = 1
    recomputes: bool = True
    fused: bool = False

    @property
    def weights(self) -> int:
        """Parameters that the published TFLOP/s count: all but those of norms."""
        layer = 4 * self.width * self.heads * HEAD + 3 * self.width * self.hidden
        return self.layers * layer + 2 * self.width * VOCABULARY

    @property
    def counted(self) -> float:
        """Operations a chip that the published TFLOP/s count: nothing that is recomputed."""
        causal = 6 * self.heads * HEAD * self.layers * SEQUENCE
        return self.batch * SEQUENCE * (6 * self.weights + causal)


MODELS = {
    "16B": Decoder(4096, 64, 28672, 32, 6),
    "32B": Decoder(8192, 64, 28672, 32, 4),
    "64B": Decoder(8192, 64, 28672, 64, 2),
    "128B": Decoder(8192, 128, 57344, 64, 1, tensor=16, recomputes=False, fused=True),
}


def mesh_of(model: Decoder, slices: int) -> Mesh:
    """The mesh of a published run: slices of 256 chips along `data`.

    Args:
        model: which.
        slices: how many.
    """
    machine = iso.planner.topology(f"v5e:{slices}*16x16" if slices > 1 else "v5e:16x16")
    shape = (slices, 256 // model.tensor, model.tensor)
    return machine.mesh(shape, ("data", "fsdp", "tensor"))


PLAN = iso.Plan(
    {
        "embedding": P("tensor", "fsdp"),
        "logits": P("fsdp", "tensor"),
        "layers.query_key_value": P(None, "fsdp", None, "tensor"),
        "layers.gate_up": P(None, "fsdp", None, "tensor"),
        "layers.out": P(None, "tensor", None, "fsdp"),
        "layers.down": P(None, "tensor", "fsdp"),
        "layers.*_norm": P(None, "tensor"),
        "layers.*": P(None, "fsdp", "tensor"),
        "final_norm": P("tensor"),
    },
    inputs=P(BATCH),
)
"""How parameters, optimizer and batch lie."""

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-5, b1=0.9, b2=0.95))


def shapes(model: Decoder, mesh: Mesh) -> tuple[Tree, Any, jax.ShapeDtypeStruct]:
    """Arguments of the step by their shapes: parameters, optimizer state, tokens.

    Args:
        model: which.
        mesh: of the run: each chip has `model.batch` sequences.
    """
    width, heads, hidden, layers = model.width, model.heads, model.hidden, model.layers
    joined: Tree = {
        "query_key_value": (layers, width, 3, heads, HEAD),
        "gate_up": (layers, width, 2, hidden),
    }
    separate: Tree = dict.fromkeys(("query", "key", "value"), (layers, width, heads, HEAD))
    separate |= dict.fromkeys(("gate", "up"), (layers, width, hidden))
    params = {
        "embedding": (VOCABULARY, width),
        "layers": {
            "attention_norm": (layers, width),
            "out": (layers, heads, HEAD, width),
            "mlp_norm": (layers, width),
            "down": (layers, hidden, width),
            **(joined if model.fused else separate),
        },
        "final_norm": (width,),
        "logits": (width, VOCABULARY),
    }
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        params,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    # One token more than is read: the target of the last.
    tokens = jax.ShapeDtypeStruct((model.batch * mesh.size, SEQUENCE + 1), jnp.int32)
    return params, jax.eval_shape(OPTIMIZER.init, params), tokens


def step_of(model: Decoder) -> Any:
    """The training step `(params, state, tokens) -> (params, state, loss)`.

    Args:
        model: which.
    """

    def train_step(params: Tree, state: Any, tokens: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(functools.partial(_loss, model))(params, tokens)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return train_step


def _loss(model: Decoder, params: Tree, tokens: jax.Array) -> jax.Array:
    policy = None
    if not model.recomputes:
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(KEPT),
            offload_src="device",
            offload_dst="pinned_host",
        )
    read, target = tokens[:, :-1], tokens[:, 1:]
    x = _constrained(_one_hot(read) @ _half(params["embedding"]), STREAM)
    x, _ = jax.lax.scan(
        jax.checkpoint(functools.partial(_layer, model), policy=policy, prevent_cse=False),
        x,
        params["layers"],
    )
    logits = _norm(x, params["final_norm"]) @ _half(params["logits"])
    logits = _constrained(logits.astype(jnp.float32), STREAM)
    picked = jnp.sum(logits * _one_hot(target).astype(jnp.float32), -1)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def _layer(model: Decoder, x: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
    y = _norm(x, layer["attention_norm"])
    query, key, value = _products(y, layer, "query", "key", "value")
    mixed = _attention(model, _rotated(query), _rotated(key), value)
    x = x + _kept(jnp.einsum("bshd,hde->bse", mixed, _half(layer["out"])), "out", STREAM)
    y = _norm(x, layer["mlp_norm"])
    gate, up = _products(y, layer, "gate", "up")
    y = _constrained(jax.nn.silu(gate) * up, STREAM)
    return x + _kept(y @ _half(layer["down"]), "down", STREAM), None


def _products(y: jax.Array, layer: Tree, *names: str) -> list[jax.Array]:
    """Of `y` with several matrices, as one product if these are one array."""
    fused = "_".join(names)
    if fused not in layer:
        outputs = (jnp.einsum("bse,e...->bs...", y, _half(layer[name])) for name in names)
        return [_kept(output, name, STREAM) for output, name in zip(outputs, names, strict=True)]
    fused_output = jnp.einsum("bse,en...->bsn...", y, _half(layer[fused]))
    return list(jnp.moveaxis(_kept(fused_output, fused, P(BATCH, None, None, "tensor")), 2, 0))


def _attention(model: Decoder, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """JAX's kernel on each chip's sequences and heads; causal."""
    blocks = splash.BlockSizes(
        **dict.fromkeys(
            (
                *("block_q", "block_kv", "block_kv_compute"),
                *("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"),
                *("block_q_dq", "block_kv_dq"),
            ),
            512,
        )
    )
    heads = model.heads // model.tensor
    mask = splash.MultiHeadMask([splash.CausalMask((SEQUENCE, SEQUENCE))] * heads)
    spec = P(BATCH, "tensor", None, None)

    @functools.partial(jax.shard_map, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)
    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        kernel = splash.make_splash_mha(
            mask=mask, head_shards=1, q_seq_shards=1, block_sizes=blocks
        )
        mixed: Any = jax.vmap(kernel)(query / math.sqrt(HEAD), key, value)
        return mixed

    moved = (operand.swapaxes(1, 2) for operand in (query, key, value))
    return attend(*moved).swapaxes(1, 2)


def _rotated(x: jax.Array) -> jax.Array:
    """Rotary positions."""
    angles = jnp.arange(SEQUENCE)[:, None] / 1e4 ** (jnp.arange(0, HEAD, 2) / HEAD)
    sine, cosine = jnp.sin(angles)[:, None, :], jnp.cos(angles)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return _half(jnp.concatenate(turned, -1))


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return _constrained(_half(wide) * _half(scale), STREAM)


def _one_hot(tokens: jax.Array) -> jax.Array:
    return jax.nn.one_hot(tokens, VOCABULARY, dtype=jnp.bfloat16)


def _half(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16)


def _kept(x: jax.Array, name: str, spec: PartitionSpec) -> jax.Array:
    return checkpoint_name(_constrained(x, spec), name)


def _constrained(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, spec)
