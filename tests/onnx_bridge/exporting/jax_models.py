"""JAX models that are exported: a GPT of Flax NNX whose head is its embedding, and its plan."""

import jax
from flax import nnx
from jax.sharding import NamedSharding

from isoshard import P
from isoshard.core.plan import Plan

DIM, HEADS, TOKENS, LENGTH = 16, 2, 32, 8
GPT_PLAN = Plan(
    {
        "*.up.kernel": P(None, "tp"),
        "*.up.bias": P("tp"),
        "*.down.kernel": P("tp"),
        "re:.*attention[.](query|key|value)[.]kernel": P(None, "tp"),
        "re:.*attention[.](query|key|value)[.]bias": P("tp"),
        "*.attention.out.kernel": P("tp"),
    },
    inputs=P("dp"),
    default=P(),
)
GPT_STAGES = {"tokens.*": 0, "positions": 0, "blocks.0.*": 0, "norm.*": 1}


def laid(x, sharding):
    """JAX's own word for a layout inside a function, by the axis types of the mesh."""
    typed = sharding.mesh.are_all_axes_explicit
    return (jax.sharding.reshard if typed else jax.lax.with_sharding_constraint)(x, sharding)


class Block(nnx.Module):
    def __init__(self, mesh, rngs):
        self.mesh = mesh
        self.before = nnx.LayerNorm(DIM, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, DIM, decode=False, rngs=rngs)
        self.between = nnx.LayerNorm(DIM, rngs=rngs)
        self.up = nnx.Linear(DIM, 4 * DIM, rngs=rngs)
        self.down = nnx.Linear(4 * DIM, DIM, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.before(x), mask=mask)
        hidden = nnx.gelu(self.up(self.between(x)))
        inside = NamedSharding(self.mesh, P("dp", None, "tp"))
        hidden = laid(hidden, inside)
        return x + self.dropout(self.down(hidden))


class GPT(nnx.Module):
    def __init__(self, mesh, rngs):
        self.tokens = nnx.Embed(TOKENS, DIM, rngs=rngs)
        self.positions = nnx.Param(jax.random.normal(rngs.params(), (LENGTH, DIM)))
        self.blocks = nnx.List([Block(mesh, rngs)])
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)

    def __call__(self, ids):
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        mask = nnx.make_causal_mask(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.tokens.attend(self.norm(x))


def gpt(mesh):
    model = nnx.jit(lambda: GPT(mesh, nnx.Rngs(0)))()
    model.eval()
    return model
