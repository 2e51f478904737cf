"""The same model in Flax NNX, around the buffers of the torch one.

Attribute names are those of the torch model, so one `Plan` serves both. `nnx.Embed` and
`nnx.LayerNorm` have the same arrays as torch under other names; `nnx.Linear` would have the
transpose, which is another array, so `Dense` keeps torch's `(out, in)` order.

>>> shapes = nnx.state(abstract(Config(layers=1, width=8, heads=2)), nnx.Param)
>>> for path, leaf in list(nnx.to_flat_state(shapes))[:4]:
...     print(torch_name(path), leaf.shape)
blocks.0.fc1.bias (32,)
blocks.0.fc1.weight (32, 8)
blocks.0.fc2.bias (8,)
blocks.0.fc2.weight (8, 32)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from .model import Config

_TORCH_NAMES = {"scale": "weight", "embedding": "weight"}


class Dense(nnx.Module):
    """A linear layer with torch's order of the weight, `(out, in)`."""

    def __init__(self, into: int, out: int, *, use_bias: bool = True, rngs: nnx.Rngs):
        """Make the layer with small random weights."""
        self.weight = nnx.Param(0.02 * jax.random.normal(rngs.params(), (out, into)))
        self.bias = nnx.Param(jnp.zeros(out)) if use_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `(.., into)` to `(.., out)`."""
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class Block(nnx.Module):
    """Attention and a two-layer MLP, each after a LayerNorm and around a residual connection."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        """Make a block."""
        width = config.width
        self.heads = config.heads
        self.ln1 = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.qkv = Dense(width, 3 * width, rngs=rngs)
        self.proj = Dense(width, width, rngs=rngs)
        self.ln2 = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.fc1 = Dense(width, 4 * width, rngs=rngs)
        self.fc2 = Dense(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `(batch, length, width)` to the same shape."""
        batch, length, width = x.shape
        qkv = self.qkv(self.ln1(x)).reshape(batch, length, self.heads, 3, width // self.heads)
        q, k, v = jnp.unstack(qkv, axis=3)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.reshape(batch, length, width))
        return x + self.fc2(nnx.gelu(self.fc1(self.ln2(x)), approximate=False))


class FlaxModel(nnx.Module):
    """A language model over bytes."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        """Make the model."""
        self.token = nnx.Embed(config.vocabulary, config.width, rngs=rngs)
        self.position = nnx.Param(jnp.zeros((config.length, config.width)))
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.ln = nnx.LayerNorm(config.width, epsilon=1e-5, rngs=rngs)
        self.head = Dense(config.width, config.vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map tokens `(batch, length)` to logits `(batch, length, vocabulary)`."""
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def abstract(config: Config) -> FlaxModel:
    """The Flax model with shapes for parameters, without memory."""
    return nnx.eval_shape(lambda: FlaxModel(config, rngs=nnx.Rngs(0)))


def adopt(config: Config, params: Mapping[str, jax.Array]) -> FlaxModel:
    """The Flax model with existing arrays as parameters.

    Args:
        config: sizes of the model.
        params: the parameters under their torch names; they are used, not copied.

    Returns:
        The model.

    Raises:
        ValueError: naming every parameter that is missing, too many, or of another shape.
    """
    model = abstract(config)
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    shapes = {torch_name(path): leaf.shape for path, leaf in state}
    weight_shapes = {name: array.shape for name, array in params.items()}
    if shapes != weight_shapes:
        wrong = sorted(name for name, _ in shapes.items() ^ weight_shapes.items())
        raise ValueError(
            f"the model and the parameters differ in {', '.join(dict.fromkeys(wrong))}"
        )
    full = [(path, leaf.replace(params[torch_name(path)])) for path, leaf in state]
    nnx.update(model, nnx.from_flat_state(full))
    return model


def named_parameters(model: FlaxModel) -> dict[str, jax.Array]:
    """The arrays of the model under their torch names."""
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {torch_name(path): leaf.get_value() for path, leaf in state}


def torch_name(path: Iterable[object]) -> str:
    """The torch name of a parameter of the Flax model."""
    return ".".join(_TORCH_NAMES.get(str(key), str(key)) for key in path)
