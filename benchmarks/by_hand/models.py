"""The hand-written forward passes and losses, by the name of the problem."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.by_hand import optimizers, resnet
from benchmarks.by_hand.layers import (
    Params,
    attention,
    conv,
    cross_entropy,
    grouped_attention,
    linear,
    norm,
    rms_norm,
)
from benchmarks.by_hand.step import ByHand
from benchmarks.models import gpt2 as torch_gpt2
from benchmarks.models import llama as torch_llama
from benchmarks.models import mlp as torch_mlp
from benchmarks.models import vit as torch_vit
from benchmarks.models.problem import Problem

Forward = Callable[[Params, jax.Array], jax.Array]


def by_hand(problem: Problem) -> ByHand:
    """The JAX side of a problem."""
    return _SIDES[problem.name](problem)


def mlp(problem: Problem) -> ByHand:
    """`benchmarks.models.mlp` in JAX."""

    forward = mlp_forward(problem)

    def loss(params: Params, buffers: Params, x: jax.Array, y: jax.Array):
        return jnp.mean((forward(params, x) - y) ** 2), buffers

    return ByHand(problem, loss, *optimizers.sgd(torch_mlp.LEARNING_RATE))


def mlp_forward(problem: Problem) -> Forward:
    """Its layers, from rows to rows."""

    def forward(params: Params, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(linear(params, "fc1", x))
        x = jax.nn.relu(linear(params, "fc2", x))
        return linear(params, "fc3", x)

    return forward


def gpt2(problem: Problem) -> ByHand:
    """`benchmarks.models.gpt2` in JAX."""
    forward = gpt2_forward(problem)

    def loss(params: Params, buffers: Params, tokens: jax.Array, targets: jax.Array):
        return cross_entropy(forward(params, tokens), targets), buffers

    adamw = optimizers.adamw(torch_gpt2.LEARNING_RATE, max_norm=torch_gpt2.MAX_NORM)
    return ByHand(problem, loss, *adamw)


def gpt2_forward(problem: Problem) -> Forward:
    """Its layers, from tokens to logits."""
    size = problem.size

    def forward(params: Params, tokens: jax.Array) -> jax.Array:
        x = params["token.weight"][tokens] + params["position"][: tokens.shape[1]]
        for number in range(size.layers):
            name = f"blocks.{number}"
            h = norm(params, f"{name}.ln1", x)
            x = x + attention(params, name, h, size.heads, is_causal=True)
            h = linear(params, f"{name}.fc1", norm(params, f"{name}.ln2", x))
            x = x + linear(params, f"{name}.fc2", jax.nn.gelu(h, approximate=True))
        return norm(params, "ln", x) @ params["token.weight"].T

    return forward


def vit(problem: Problem) -> ByHand:
    """`benchmarks.models.vit` in JAX."""
    size = problem.size
    epsilon = torch_vit.EPSILON

    def forward(params: Params, images: jax.Array) -> jax.Array:
        x = conv(images, params["patches.weight"], size.patch) + params["patches.bias"]
        x = x.reshape(len(x), -1, size.width)
        first = jnp.broadcast_to(params["token"], (len(x), 1, size.width))
        x = jnp.concatenate([first, x], 1) + params["position"]
        for number in range(size.layers):
            name = f"blocks.{number}"
            h = norm(params, f"{name}.ln1", x, epsilon)
            x = x + attention(params, name, h, size.heads, is_causal=False)
            h = linear(params, f"{name}.fc1", norm(params, f"{name}.ln2", x, epsilon))
            x = x + linear(params, f"{name}.fc2", jax.nn.gelu(h, approximate=False))
        return linear(params, "head", norm(params, "ln", x, epsilon)[:, 0])

    def loss(params: Params, buffers: Params, images: jax.Array, labels: jax.Array):
        return cross_entropy(forward(params, images), labels), buffers

    adamw = optimizers.adamw(torch_vit.LEARNING_RATE)
    return ByHand(problem, loss, *adamw, stored=channels_last)


def channels_last(name: str, array: np.ndarray) -> np.ndarray:
    """Images as `(batch, height, width, channels)`, kernels as `(height, width, in, out)`."""
    if array.ndim != 4:
        return array
    return array.transpose((0, 2, 3, 1) if name == "batch" else (2, 3, 1, 0))


def llama(problem: Problem) -> ByHand:
    """`benchmarks.models.llama` in JAX."""
    size = problem.size
    epsilon = torch_llama.EPSILON

    def forward(params: Params, tokens: jax.Array) -> jax.Array:
        x = params["model.embed_tokens.weight"][tokens]
        for number in range(size.layers):
            name = f"model.layers.{number}"
            h = rms_norm(params, f"{name}.input_layernorm", x, epsilon)
            x = x + grouped_attention(params, f"{name}.self_attn", h, size, torch_llama.THETA)
            h = rms_norm(params, f"{name}.post_attention_layernorm", x, epsilon)
            gate, up = (h @ params[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            x = x + (jax.nn.silu(gate) * up) @ params[f"{name}.mlp.down_proj.weight"].T
        return rms_norm(params, "model.norm", x, epsilon) @ params["lm_head.weight"].T

    def loss(params: Params, buffers: Params, tokens: jax.Array):
        logits = forward(params, tokens)[:, :-1].astype(jnp.float32)
        return cross_entropy(logits, tokens[:, 1:]), buffers

    return ByHand(problem, loss, *optimizers.adamw(torch_llama.LEARNING_RATE))


def resnet50(problem: Problem) -> ByHand:
    """`benchmarks.models.resnet` in JAX."""
    return ByHand(
        problem,
        resnet.loss,
        *resnet.OPTIMIZER,
        stored=channels_last,
        buffers=("running_mean", "running_var"),
    )


FORWARDS: dict[str, Callable[[Problem], Forward]] = {"mlp": mlp_forward, "gpt2": gpt2_forward}
_SIDES: dict[str, Callable[[Problem], ByHand]] = {
    "mlp": mlp,
    "gpt2": gpt2,
    "vit": vit,
    "llama": llama,
    "resnet50": resnet50,
}
