"""Linen models described to a plan: the rows are those that a run constrains."""

import jax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.plan import Activation
from isoshard.jax_bridge import constrain_activations, linen_model

INPUT = jax.ShapeDtypeStruct((4, 8), "float32")
KEY = jax.random.key(0)


class Block(linen.Module):
    @linen.compact
    def __call__(self, x):
        up = linen.with_partitioning(linen.initializers.lecun_normal(), (None, "wide"))
        x = linen.Dense(16, name="up", kernel_init=up)(x)
        return linen.Dropout(0.5, deterministic=True)(linen.Dense(8, name="down")(x))


class Model(linen.Module):
    blocks: int = 2

    @linen.compact
    def __call__(self, x, *, scale=1.0):
        assert isinstance(scale, float)
        for number in range(self.blocks):
            x = linen.LayerNorm()(x + Block(name=f"block_{number}")(x)) * scale
        return x


@pytest.fixture
def mesh():
    return iso.make_mesh((2, 4), ("data", "model"))


PLAN = iso.Plan(
    axes={"wide": "model"},
    default=P(),
    activations={
        "block_*.up": P("data", "model"),
        "block_*.Dropout_0": Activation(input={"0": P("data")}, output=P("data")),
        "*.gone": P("data"),
    },
)


def test_rows_are_those_of_a_run(mesh):
    found = PLAN.resolve(linen_model(Model(), KEY, INPUT), mesh)
    rows = [(row.module, row.side) for row in found.activations]
    per_block = [("up", "output"), ("Dropout_0", "input"), ("Dropout_0", "output")]
    assert rows == [(f"block_{n}.{name}", side) for n in range(2) for name, side in per_block]
    assert found.unused == ("*.gone (activation)",)

    variables = jax.eval_shape(Model().init, KEY, INPUT)
    with constrain_activations(mesh, PLAN) as seen:
        jax.eval_shape(Model().apply, variables, INPUT)
    assert [*seen.modules] == list(dict.fromkeys(module for module, _ in rows))


def test_leaves_are_those_of_the_variables(mesh):
    described = linen_model(Model(), KEY, INPUT, scale=2.0)
    assert described.modules[:3] == ("", "block_0", "block_0.up")
    variables = jax.eval_shape(Model().init, KEY, INPUT)
    assert PLAN.resolve(described, mesh).leaves == PLAN.resolve(variables, mesh).leaves
    assert PLAN.resolve(described, mesh).specs["params.block_1.up.kernel"] == P(None, "model")


def test_a_rule_that_decides_nothing_is_told_under_strict(mesh):
    plan = iso.Plan({"*": P()}, activations={"block_0.Up": P("data")})
    with pytest.raises(iso.PlanError, match=r"rule 'block_0\.Up \(activation\)' decides nothing"):
        plan.resolve(linen_model(Model(), KEY, INPUT), mesh, strict=True)


def test_what_is_refused(mesh):
    with pytest.raises(TypeError, match="not a Linear; pass modules of NNX"):
        linen_model(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), KEY)
    described = linen_model(Model(), KEY, INPUT)
    with pytest.raises(
        TypeError, match="shard is not implemented for linen objects such as LinenModel"
    ):
        iso.shard(described, mesh, PLAN)
