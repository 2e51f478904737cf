"""Training steps of seven families of models in plain JAX, by shapes alone, to plan with.

Each is a step of Adam: `step(params, state, **batch) -> (params, state, loss)`. Parameters have the
names and axes that torch gives them (`weight[out, in]`), layers are a Python loop; `stacked=True`
of Llama is a scan over stacked layers. Nothing here has elements.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from isoshard.core.traced.traced_step import MODULE

Tree = dict[str, Any]
Loss = Callable[[Any, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Family:
    """A model to plan.

    Attributes:
        name: of the family.
        step: the training step.
        args: shapes of its arguments.
        kind: which hand plans suit it: "transformer", "mlp", "images" or "tables".
    """

    name: str
    step: Callable[..., Any]
    args: tuple[Any, ...]
    kind: str


def _family(name: str, kind: str, loss: Loss, params: Tree, batch: Tree) -> Family:
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["exp_avg"], grads)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state["exp_avg_sq"], grads)
        params = jax.tree.map(
            lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), params, first, second
        )
        return params, {"exp_avg": first, "exp_avg_sq": second}, value

    return Family(name, step, (params, {"exp_avg": params, "exp_avg_sq": params}, batch), kind)


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _half(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16)


def _module(name: str, x: jax.Array) -> jax.Array:
    """Say that `x` is the output of a module."""
    return checkpoint_name(x, MODULE + name)


def _linear(layer: Tree, x: jax.Array, name: str) -> jax.Array:
    y = x @ _half(layer["weight"]).T
    return _module(name, y + _half(layer["bias"]) if "bias" in layer else y)


def _dense(out: int, into: int, *, bias: bool = False) -> Tree:
    return {"weight": _f32(out, into)} | ({"bias": _f32(out)} if bias else {})


def _norm(layer: Tree, x: jax.Array, name: str) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return _module(name, _half(wide * layer["weight"]))


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    picked = jnp.sum(jnp.where(_one_hot(labels, logits.shape[-1]), logits, 0.0), -1)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def _one_hot(labels: jax.Array, size: int) -> jax.Array:
    return labels[..., None] == jnp.arange(size)


def _attention(
    layer: Tree, x: jax.Array, heads: int, kv_heads: int, name: str, *, causal: bool
) -> jax.Array:
    q, k, v = (
        _linear(layer[projection], x, f"{name}.{projection}")
        for projection in ("q_proj", "k_proj", "v_proj")
    )
    mixed = _heads(q, k, v, heads, kv_heads, causal=causal)
    return _linear(layer["o_proj"], mixed, f"{name}.o_proj")


def _heads(
    q: jax.Array, k: jax.Array, v: jax.Array, heads: int, kv_heads: int, *, causal: bool
) -> jax.Array:
    batch, length, width = q.shape
    size = width // heads
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, size)
    k = k.reshape(batch, length, kv_heads, size)
    v = v.reshape(batch, length, kv_heads, size)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k).astype(jnp.float32) / size**0.5
    if causal:
        mask = jnp.arange(length)[:, None] >= jnp.arange(length)[None, :]
        scores = jnp.where(mask, scores, -1e9)
    weights = _half(jax.nn.softmax(scores, -1))
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights, v).reshape(batch, length, width)


def mlp(*, layers: int = 8, width: int = 8192, batch: int = 4096) -> Family:
    """A chain of square layers."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x = _half(batch["x"])
        for number in range(layers):
            x = jax.nn.relu(_linear(params["layers"][str(number)], x, f"layers.{number}"))
        return jnp.mean((x.astype(jnp.float32) - batch["y"]) ** 2)

    params = {"layers": {str(n): _dense(width, width, bias=True) for n in range(layers)}}
    return _family("MLP", "mlp", loss, params, {"x": _f32(batch, width), "y": _f32(batch, width)})


def gpt2(
    *, layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 50304,
    batch: int = 64, length: int = 1024,
) -> Family:  # fmt: skip
    """GPT-2: fused query, key and value, learned positions, the head tied to the embedding."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x = _module("wte", _half(params["wte"]["weight"])[batch["tokens"]])
        x = x + _half(params["wpe"]["weight"])
        for number in range(layers):
            layer, name = params["h"][str(number)], f"h.{number}"
            y = _norm(layer["ln_1"], x, f"{name}.ln_1")
            qkv = _linear(layer["attn"]["c_attn"], y, f"{name}.attn.c_attn")
            mixed = _heads(*jnp.split(qkv, 3, -1), heads, heads, causal=True)
            x = x + _linear(layer["attn"]["c_proj"], mixed, f"{name}.attn.c_proj")
            y = _norm(layer["ln_2"], x, f"{name}.ln_2")
            up = jax.nn.gelu(_linear(layer["mlp"]["c_fc"], y, f"{name}.mlp.c_fc"))
            x = _module(name, x + _linear(layer["mlp"]["c_proj"], up, f"{name}.mlp.c_proj"))
        logits = _norm(params["ln_f"], x, "ln_f") @ _half(params["wte"]["weight"]).T
        return _cross_entropy(logits, batch["labels"])

    block = {
        "ln_1": {"weight": _f32(width)},
        "ln_2": {"weight": _f32(width)},
        "attn": {
            "c_attn": _dense(3 * width, width, bias=True),
            "c_proj": _dense(width, width, bias=True),
        },
        "mlp": {
            "c_fc": _dense(4 * width, width, bias=True),
            "c_proj": _dense(width, 4 * width, bias=True),
        },
    }
    params = {
        "wte": {"weight": _f32(vocabulary, width)},
        "wpe": {"weight": _f32(length, width)},
        "h": {str(n): block for n in range(layers)},
        "ln_f": {"weight": _f32(width)},
    }
    tokens = {"tokens": _i32(batch, length), "labels": _i32(batch, length)}
    return _family("GPT-2", "transformer", loss, params, tokens)


def llama(
    *, layers: int = 32, width: int = 4096, inner: int = 14336, heads: int = 32,
    kv_heads: int = 8, vocabulary: int = 128256, batch: int = 256, length: int = 4096,
    stacked: bool = False,
) -> Family:  # fmt: skip
    """Llama 3 of 8B, each layer computed again in the backward pass."""

    @functools.partial(jax.checkpoint, static_argnums=2)
    def block(layer: Tree, x: jax.Array, name: str) -> jax.Array:
        y = _norm(layer["input_layernorm"], x, f"{name}.input_layernorm")
        attention = layer["self_attn"]
        x = x + _attention(attention, y, heads, kv_heads, f"{name}.self_attn", causal=True)
        y = _norm(layer["post_attention_layernorm"], x, f"{name}.post_attention_layernorm")
        gate, up = (
            _linear(layer["mlp"][projection], y, f"{name}.mlp.{projection}")
            for projection in ("gate_proj", "up_proj")
        )
        down = _linear(layer["mlp"]["down_proj"], jax.nn.silu(gate) * up, f"{name}.mlp.down_proj")
        return _module(name, x + down)

    def loss(params: Any, batch: Any) -> jax.Array:
        x = _module("embed_tokens", _half(params["embed_tokens"]["weight"])[batch["tokens"]])
        if stacked:

            def layer(x: jax.Array, layer: Tree) -> tuple[jax.Array, None]:
                return block(layer, x, "layers"), None

            x = jax.lax.scan(layer, x, params["layers"])[0]
        else:
            for number in range(layers):
                x = block(params["layers"][str(number)], x, f"layers.{number}")
        logits = _linear(params["lm_head"], _norm(params["norm"], x, "norm"), "lm_head")
        return _cross_entropy(logits, batch["labels"])

    key = width // heads * kv_heads
    layer_shapes = {
        "input_layernorm": {"weight": _f32(width)},
        "post_attention_layernorm": {"weight": _f32(width)},
        "self_attn": {
            "q_proj": _dense(width, width),
            "k_proj": _dense(key, width),
            "v_proj": _dense(key, width),
            "o_proj": _dense(width, width),
        },
        "mlp": {
            "gate_proj": _dense(inner, width),
            "up_proj": _dense(inner, width),
            "down_proj": _dense(width, inner),
        },
    }
    stacked_shapes = jax.tree.map(lambda x: _f32(layers, *x.shape), layer_shapes)
    params = {
        "embed_tokens": {"weight": _f32(vocabulary, width)},
        "layers": stacked_shapes if stacked else {str(n): layer_shapes for n in range(layers)},
        "norm": {"weight": _f32(width)},
        "lm_head": _dense(vocabulary, width),
    }
    tokens = {"tokens": _i32(batch, length), "labels": _i32(batch, length)}
    return _family("Llama", "transformer", loss, params, tokens)


def mixtral(
    *, layers: int = 32, width: int = 4096, inner: int = 14336, heads: int = 32,
    kv_heads: int = 8, experts: int = 8, vocabulary: int = 32000, batch: int = 256,
    length: int = 4096,
) -> Family:  # fmt: skip
    """Mixtral of 8 x 7B: two experts of eight for each token, with a capacity."""
    capacity = 2 * length // experts * 5 // 4

    def moe(layer: Tree, x: jax.Array, name: str) -> jax.Array:
        scores = _linear(layer["gate"], x, f"{name}.gate")
        scores = jax.nn.softmax(scores.astype(jnp.float32), -1)
        chosen = scores >= jax.lax.top_k(scores, 2)[0][..., 1:]
        place = jnp.cumsum(chosen, 1) * chosen - 1
        send = _half(_one_hot(place, capacity))
        taken = jnp.einsum("bsxc,bse->xbce", send, x)
        up = jax.nn.silu(jnp.einsum("xbce,xfe->xbcf", taken, _half(layer["experts"]["w1"])))
        up = up * jnp.einsum("xbce,xfe->xbcf", taken, _half(layer["experts"]["w3"]))
        down = jnp.einsum("xbcf,xef->xbce", up, _half(layer["experts"]["w2"]))
        down = _module(f"{name}.experts", down)
        return jnp.einsum("bsxc,xbce->bse", send * _half(scores)[..., None], down)

    @functools.partial(jax.checkpoint, static_argnums=2)
    def block(layer: Tree, x: jax.Array, name: str) -> jax.Array:
        y = _norm(layer["input_layernorm"], x, f"{name}.input_layernorm")
        attention = layer["self_attn"]
        x = x + _attention(attention, y, heads, kv_heads, f"{name}.self_attn", causal=True)
        y = _norm(layer["post_attention_layernorm"], x, f"{name}.post_attention_layernorm")
        return _module(name, x + moe(layer["block_sparse_moe"], y, f"{name}.block_sparse_moe"))

    def loss(params: Any, batch: Any) -> jax.Array:
        x = _module("embed_tokens", _half(params["embed_tokens"]["weight"])[batch["tokens"]])
        for number in range(layers):
            x = block(params["layers"][str(number)], x, f"layers.{number}")
        logits = _linear(params["lm_head"], _norm(params["norm"], x, "norm"), "lm_head")
        return _cross_entropy(logits, batch["labels"])

    key = width // heads * kv_heads
    layer_shapes = {
        "input_layernorm": {"weight": _f32(width)},
        "post_attention_layernorm": {"weight": _f32(width)},
        "self_attn": {
            "q_proj": _dense(width, width),
            "k_proj": _dense(key, width),
            "v_proj": _dense(key, width),
            "o_proj": _dense(width, width),
        },
        "block_sparse_moe": {
            "gate": _dense(experts, width),
            "experts": {
                "w1": _f32(experts, inner, width),
                "w2": _f32(experts, width, inner),
                "w3": _f32(experts, inner, width),
            },
        },
    }
    params = {
        "embed_tokens": {"weight": _f32(vocabulary, width)},
        "layers": {str(n): layer_shapes for n in range(layers)},
        "norm": {"weight": _f32(width)},
        "lm_head": _dense(vocabulary, width),
    }
    tokens = {"tokens": _i32(batch, length), "labels": _i32(batch, length)}
    return _family("Mixtral", "transformer", loss, params, tokens)


def vit(
    *, layers: int = 24, width: int = 1024, heads: int = 16, image: int = 224, patch: int = 16,
    batch: int = 4096, classes: int = 1000,
) -> Family:  # fmt: skip
    """ViT of size L: patches by one linear layer, learned positions, the mean as the class."""
    length = (image // patch) ** 2

    @functools.partial(jax.checkpoint, static_argnums=2)
    def block(layer: Tree, x: jax.Array, name: str) -> jax.Array:
        y = _norm(layer["norm1"], x, f"{name}.norm1")
        x = x + _attention(layer["attn"], y, heads, heads, f"{name}.attn", causal=False)
        y = _norm(layer["norm2"], x, f"{name}.norm2")
        up = jax.nn.gelu(_linear(layer["mlp"]["fc1"], y, f"{name}.mlp.fc1"))
        return _module(name, x + _linear(layer["mlp"]["fc2"], up, f"{name}.mlp.fc2"))

    def loss(params: Any, batch: Any) -> jax.Array:
        patches = _half(batch["patches"])
        x = _linear(params["patch_embed"]["proj"], patches, "patch_embed.proj")
        x = x + _half(params["pos_embed"])
        for number in range(layers):
            x = block(params["blocks"][str(number)], x, f"blocks.{number}")
        logits = _linear(params["head"], jnp.mean(_norm(params["norm"], x, "norm"), 1), "head")
        return _cross_entropy(logits, batch["labels"])

    layer_shapes = {
        "norm1": {"weight": _f32(width)},
        "norm2": {"weight": _f32(width)},
        "attn": {name: _dense(width, width) for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
        "mlp": {
            "fc1": _dense(4 * width, width, bias=True),
            "fc2": _dense(width, 4 * width, bias=True),
        },
    }
    params = {
        "patch_embed": {"proj": _dense(width, 3 * patch * patch, bias=True)},
        "pos_embed": _f32(1, length, width),
        "blocks": {str(n): layer_shapes for n in range(layers)},
        "norm": {"weight": _f32(width)},
        "head": _dense(classes, width, bias=True),
    }
    batch_shapes = {"patches": _f32(batch, length, 3 * patch * patch), "labels": _i32(batch)}
    return _family("ViT", "transformer", loss, params, batch_shapes)


def unet(
    *, widths: tuple[int, ...] = (128, 256, 512, 1024), image: int = 256, batch: int = 64
) -> Family:
    """A U-Net: two convolutions a level, down by strides, up by repeating, skips joined."""

    def conv(layer: Tree, x: jax.Array, name: str, stride: int = 1) -> jax.Array:
        y = jax.lax.conv_general_dilated(
            x, _half(layer["weight"]), (stride, stride), "SAME",
            dimension_numbers=("NHWC", "OIHW", "NHWC"),
        )  # fmt: skip
        return _module(name, y + _half(layer["bias"]))

    def double(layer: Tree, x: jax.Array, name: str) -> jax.Array:
        x = jax.nn.relu(conv(layer["conv1"], x, f"{name}.conv1"))
        return jax.nn.relu(conv(layer["conv2"], x, f"{name}.conv2"))

    def loss(params: Any, batch: Any) -> jax.Array:
        x, skips = _half(batch["image"]), []
        for number in range(len(widths)):
            level, name = params["down"][str(number)], f"down.{number}"
            x = double(level, x, name)
            if number < len(widths) - 1:
                skips.append(x)
                x = conv(level["pool"], x, f"{name}.pool", 2)
        for number, skip in enumerate(reversed(skips)):
            level, name = params["up"][str(number)], f"up.{number}"
            x = jnp.repeat(jnp.repeat(conv(level["grow"], x, f"{name}.grow"), 2, 1), 2, 2)
            x = double(level, jnp.concatenate([x, skip], -1), name)
        x = conv(params["out"], x, "out")
        return jnp.mean((x.astype(jnp.float32) - batch["target"]) ** 2)

    def weight(out: int, into: int, size: int = 3) -> Tree:
        return {"weight": _f32(out, into, size, size), "bias": _f32(out)}

    down, up = {}, {}
    before = 3
    for number, width in enumerate(widths):
        down[str(number)] = {"conv1": weight(width, before), "conv2": weight(width, width)}
        if number < len(widths) - 1:
            down[str(number)]["pool"] = weight(width, width)
        before = width
    for number, width in enumerate(reversed(widths[:-1])):
        up[str(number)] = {
            "grow": weight(width, before),
            "conv1": weight(width, 2 * width),
            "conv2": weight(width, width),
        }
        before = width
    params = {"down": down, "up": up, "out": weight(3, before, 1)}
    pictures = {"image": _f32(batch, image, image, 3), "target": _f32(batch, image, image, 3)}
    return _family("U-Net", "images", loss, params, pictures)


def dlrm(
    *, rows: tuple[int, ...] = (40_000_000, 16_000_000, 4_000_000, 1_000_000) + (65536,) * 8,
    width: int = 128, batch: int = 65536,
) -> Family:  # fmt: skip
    """Embedding tables of very different sizes, between a small MLP below and one above."""

    def chain(layers: Tree, x: jax.Array, name: str) -> jax.Array:
        for number in range(len(layers)):
            x = jax.nn.relu(_linear(layers[str(number)], x, f"{name}.{number}"))
        return x

    def loss(params: Any, batch: Any) -> jax.Array:
        dense = chain(params["bottom"], _half(batch["dense"]), "bottom")
        tables = params["tables"]
        embedded = [
            _half(_module(f"tables.{n}", tables[str(n)]["weight"][batch["sparse"][:, n]]))
            for n in range(len(rows))
        ]
        features = jnp.stack([dense, *embedded], 1)
        pairs = jnp.einsum("bie,bje->bij", features, features).reshape(features.shape[0], -1)
        above = chain(params["top"], jnp.concatenate([dense, pairs], -1), "top")
        logits = _linear(params["over"], above, "over")
        return jnp.mean(jax.nn.softplus(logits.astype(jnp.float32)[:, 0]) - batch["clicks"])

    def layers(*sizes: int) -> Tree:
        pairs = zip(sizes[1:], sizes[:-1], strict=True)
        return {str(n): _dense(out, into, bias=True) for n, (out, into) in enumerate(pairs)}

    params = {
        "tables": {str(n): {"weight": _f32(size, width)} for n, size in enumerate(rows)},
        "bottom": layers(16, 512, 256, width),
        "top": layers(width + (len(rows) + 1) ** 2, 1024, 1024, 512),
        "over": _dense(1, 512, bias=True),
    }
    batch_shapes = {
        "dense": _f32(batch, 16),
        "sparse": _i32(batch, len(rows)),
        "clicks": _f32(batch),
    }
    return _family("DLRM", "tables", loss, params, batch_shapes)


FAMILIES: Mapping[str, Callable[..., Family]] = {
    "MLP": mlp,
    "GPT-2": gpt2,
    "Llama": llama,
    "Llama, stacked": functools.partial(llama, stacked=True),
    "Mixtral": mixtral,
    "ViT": vit,
    "U-Net": unet,
    "DLRM": dlrm,
}
