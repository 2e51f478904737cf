"""Two models in torch and in Flax NNX, with the same weights under the same names.

A Llama of `transformers` by its configuration, unmodified, and a chain of linear layers. The Flax
modules store weights as torch does, `(out, in)`, so that one plan shards both. Both minimise the
same loss: the next token's cross entropy, and a mean square.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

_TORCH_NAMES = {"scale": "weight", "embedding": "weight"}


@dataclasses.dataclass(frozen=True)
class ModelPair:
    """One model in both frameworks.

    Attributes:
        name: for tables.
        torch: makes the torch module, with weights of seed 0.
        flax: makes the NNX module, with weights of its own.
        torch_loss: of the torch module and a batch.
        flax_loss: of the NNX module and a batch.
        batch: makes a batch by its number: an array whose first axis are samples.
    """

    name: str
    torch: Callable[[], torch.nn.Module]
    flax: Callable[[], nnx.Module]
    torch_loss: Callable[[Any, torch.Tensor], torch.Tensor]
    flax_loss: Callable[[Any, jax.Array], jax.Array]
    batch: Callable[[int], np.ndarray[Any, Any]]


def adopt(flax_model: nnx.Module, module: torch.nn.Module) -> nnx.Module:
    """Give a Flax model the weights of a torch module.

    Args:
        flax_model: changed in place.
        module: on the CPU.

    Raises:
        ValueError: their parameters differ in names or shapes.
    """
    state = nnx.to_flat_state(nnx.state(flax_model, nnx.Param))
    shapes = {torch_name(path): tuple(leaf.shape) for path, leaf in state}
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    if shapes != {name: tuple(parameter.shape) for name, parameter in parameters.items()}:
        raise ValueError(f"the Flax model has {shapes}, and torch {parameters.keys()}")
    # A copy: the optimizer of torch changes the module's own memory.
    full = [(path, leaf.replace(jnp.array(parameters[torch_name(path)]))) for path, leaf in state]
    nnx.update(flax_model, nnx.from_flat_state(full))
    return flax_model


def torch_name(path: Iterable[object]) -> str:
    """Name a parameter of a Flax model as torch does.

    Args:
        path: of the leaf.
    """
    return ".".join(_TORCH_NAMES.get(str(part), str(part)) for part in path)


class Dense(nnx.Module):
    """A linear layer with torch's order of the weight, `(out, in)`."""

    def __init__(self, into: int, out: int, *, rngs: nnx.Rngs):
        """Make it."""
        self.weight = nnx.Param(0.02 * jax.random.normal(rngs.params(), (out, into)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Call it."""
        return x @ self.weight.T


class Table(nnx.Module):
    """An embedding, with torch's name of the weight."""

    def __init__(self, count: int, width: int, *, rngs: nnx.Rngs):
        """Make it."""
        self.weight = nnx.Param(0.02 * jax.random.normal(rngs.params(), (count, width)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Call it."""
        return self.weight.get_value()[tokens]


class Norm(nnx.Module):
    """RMSNorm as Llama has it."""

    def __init__(self, width: int):
        """Make it."""
        self.weight = nnx.Param(jnp.ones(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Call it."""
        return self.weight * (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6))


class Attention(nnx.Module):
    """Causal attention with rotary positions and grouped keys."""

    def __init__(self, config: Mapping[str, int], *, rngs: nnx.Rngs):
        """Make it."""
        width = config["hidden_size"]
        self.heads, self.grouped = config["num_attention_heads"], config["num_key_value_heads"]
        self.size = width // self.heads
        self.q_proj = Dense(width, width, rngs=rngs)
        self.k_proj = Dense(width, self.grouped * self.size, rngs=rngs)
        self.v_proj = Dense(width, self.grouped * self.size, rngs=rngs)
        self.o_proj = Dense(width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Call it."""
        batch, length, width = x.shape

        def heads(projected: jax.Array) -> jax.Array:
            return projected.reshape(batch, length, -1, self.size)

        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        mixed = jax.nn.dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)
        return self.o_proj(mixed.reshape(batch, length, width))


def _rotated(x: jax.Array) -> jax.Array:
    """Rotary positions: the halves of a head's features are real and imaginary parts."""
    length, size = x.shape[1], x.shape[3]
    rate = 1e4 ** -(jnp.arange(0, size, 2) / size)
    angle = jnp.arange(length)[:, None] * rate[None, :]
    cos, sin = (jnp.tile(f(angle), (1, 2))[None, :, None, :] for f in (jnp.cos, jnp.sin))
    first, other = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-other, first], -1) * sin


class GatedMlp(nnx.Module):
    """Llama's MLP."""

    def __init__(self, width: int, inner: int, *, rngs: nnx.Rngs):
        """Make it."""
        self.gate_proj = Dense(width, inner, rngs=rngs)
        self.up_proj = Dense(width, inner, rngs=rngs)
        self.down_proj = Dense(inner, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Call it."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """A decoder's layer."""

    def __init__(self, config: Mapping[str, int], *, rngs: nnx.Rngs):
        """Make it."""
        width = config["hidden_size"]
        self.self_attn = Attention(config, rngs=rngs)
        self.mlp = GatedMlp(width, config["intermediate_size"], rngs=rngs)
        self.input_layernorm, self.post_attention_layernorm = Norm(width), Norm(width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Call it."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nnx.Module):
    """All but the head."""

    def __init__(self, config: Mapping[str, int], *, rngs: nnx.Rngs):
        """Make it."""
        width = config["hidden_size"]
        self.embed_tokens = Table(config["vocab_size"], width, rngs=rngs)
        layers = range(config["num_hidden_layers"])
        self.layers = nnx.List([Layer(config, rngs=rngs) for _ in layers])
        self.norm = Norm(width)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Call it."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class FlaxLlama(nnx.Module):
    """`LlamaForCausalLM` in NNX."""

    def __init__(self, config: Mapping[str, int], *, rngs: nnx.Rngs):
        """Make it."""
        self.model = Decoder(config, rngs=rngs)
        self.lm_head = Dense(config["hidden_size"], config["vocab_size"], rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Call it."""
        return self.lm_head(self.model(tokens))


def _next_token_loss(model: Any, tokens: jax.Array) -> jax.Array:
    logits = jax.nn.log_softmax(model(tokens))[:, :-1]
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))


def llama(
    *, layers: int, width: int, inner: int, heads: int, kv_heads: int, vocabulary: int,
    batch: int, length: int,
) -> ModelPair:  # fmt: skip
    """A Llama of transformers, and the same model in Flax."""
    sizes = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    }

    def module() -> torch.nn.Module:
        import transformers  # slow to import

        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            **sizes, max_position_embeddings=length, rms_norm_eps=1e-6, use_cache=False
        )
        return transformers.LlamaForCausalLM(config)

    return ModelPair(
        "Llama",
        module,
        lambda: FlaxLlama(sizes, rngs=nnx.Rngs(0)),
        lambda model, tokens: model(input_ids=tokens, labels=tokens).loss,
        _next_token_loss,
        lambda number: np.random.default_rng(number).integers(0, vocabulary, (batch, length)),
    )


class TorchPair(torch.nn.Module):
    """A linear layer up and one down, with relu after each."""

    def __init__(self, width: int, inner: int):
        """Make it."""
        super().__init__()
        self.fc1 = torch.nn.Linear(width, inner, bias=False)
        self.fc2 = torch.nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call it."""
        return torch.relu(self.fc2(torch.relu(self.fc1(x))))


class TorchChain(torch.nn.Module):
    """Pairs of linear layers, one after the other."""

    def __init__(self, layers: int, width: int, inner: int):
        """Make it."""
        super().__init__()
        self.layers = torch.nn.ModuleList(TorchPair(width, inner) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call it."""
        for layer in self.layers:
            x = layer(x)
        return x


class FlaxPair(nnx.Module):
    """A pair in NNX."""

    def __init__(self, width: int, inner: int, *, rngs: nnx.Rngs):
        """Make it."""
        self.fc1, self.fc2 = Dense(width, inner, rngs=rngs), Dense(inner, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Call it."""
        return jax.nn.relu(self.fc2(jax.nn.relu(self.fc1(x))))


class FlaxChain(nnx.Module):
    """The chain in NNX."""

    def __init__(self, layers: int, width: int, inner: int, *, rngs: nnx.Rngs):
        """Make it."""
        self.layers = nnx.List([FlaxPair(width, inner, rngs=rngs) for _ in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Call it."""
        for layer in self.layers:
            x = layer(x)
        return x


def chain(*, layers: int, width: int, inner: int, batch: int) -> ModelPair:
    """A chain of pairs of linear layers, and the same model in Flax."""

    def module() -> torch.nn.Module:
        torch.manual_seed(0)
        return TorchChain(layers, width, inner)

    def samples(number: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng(number).standard_normal((batch, width), np.float32)

    return ModelPair(
        "MLP",
        module,
        lambda: FlaxChain(layers, width, inner, rngs=nnx.Rngs(0)),
        lambda model, x: (model(x) - 1.0).square().mean(),
        lambda model, x: jnp.mean((model(x) - 1.0) ** 2),
        samples,
    )
