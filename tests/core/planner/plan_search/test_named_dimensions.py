"""Dimensions by following a program: what is alike, what stays apart, layers as one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from benchmarks.planning_models import Family, dlrm, llama, mlp
from isoshard.core.planner.machine.topologies import topology
from isoshard.core.planner.plan_search.condensed_program import condensed
from isoshard.core.planner.plan_search.named_dimensions import (
    NamedDimensions,
    Union,
    layer_pattern,
    named_dimensions,
)
from isoshard.core.planner.traced.jax_steps import traced_jax_step

SMALL = {"width": 64, "inner": 128, "heads": 8, "kv_heads": 4, "vocabulary": 256, "length": 16}


def found(family: Family) -> NamedDimensions:
    mesh = topology("v5e:2x4").mesh((2, 4), ("data", "model"))
    return named_dimensions(traced_jax_step(family.step, family.args, {}, mesh))


def by_name(dimensions: NamedDimensions) -> dict[str, tuple[int, ...]]:
    return {group.names[0]: group.dimensions for group in dimensions.groups}


def test_a_decoder_has_seven_dimensions():
    dims = by_name(found(llama(layers=2, batch=8, **SMALL)))
    vocabulary, embed = dims["embed_tokens.weight"]
    inner, again = dims["layers.0.mlp.up_proj.weight"]
    heads, _ = dims["layers.0.self_attn.q_proj.weight"]
    head, _ = dims["lm_head.weight"]
    batch, length = dims["batch.tokens"]
    assert again == embed
    assert len({vocabulary, embed, inner, heads, head, batch, length}) == 7
    assert dims["layers.0.mlp.down_proj.weight"] == (embed, inner)
    assert dims["layers.0.self_attn.k_proj.weight"] == (heads, embed)
    assert dims["layers.0.self_attn.o_proj.weight"] == (embed, heads)
    assert dims["batch.labels"] == (batch, length)
    assert dims["norm.weight"] == (embed,)


def test_layers_are_one_choice_whatever_their_number():
    kinds = []
    for layers in (2, 6):
        family = llama(layers=layers, batch=8, **SMALL)
        mesh = topology("v5e:2x4").mesh((8,), ("data",))
        step = traced_jax_step(family.step, family.args, {}, mesh)
        dimensions = named_dimensions(step)
        program = condensed(step, dimensions)
        sizes = {len(group.names) for group in dimensions.groups}
        assert sizes == {1, layers}
        kinds.append((len(dimensions.groups), len(program.ops), len(program.values)))
    assert kinds[0] == kinds[1]


def test_a_stack_keeps_its_leading_axis():
    dims = by_name(found(llama(layers=3, batch=8, stacked=True, **SMALL)))
    plain = by_name(found(llama(layers=3, batch=8, **SMALL)))
    for name in ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "input_layernorm"):
        leading, *rest = dims[f"layers.{name}.weight"]
        assert leading == -1
        assert tuple(rest) == plain[f"layers.0.{name}.weight"]


def test_a_chain_of_square_layers_alternates():
    dims = by_name(found(mlp(layers=4, width=64, batch=32)))
    first, second = dims["layers.0.weight"]
    assert first != second
    assert dims["layers.1.weight"] == (second, first)
    assert "layers.2.weight" not in dims
    assert dims["layers.1.bias"] == (second,)


def test_queries_and_keys_stay_apart():
    mesh = topology("v5e:2x4").mesh((8,), ("data",))

    def attention(params, x):
        q, k, v = x @ params["q"], x @ params["k"], x @ params["v"]
        weights = jax.nn.softmax(jnp.einsum("bqe,bke->bqk", q, k))
        return jnp.sum(jnp.einsum("bqk,bke->bqe", weights, v))

    weight = jax.ShapeDtypeStruct((32, 32), "float32")
    x = jax.ShapeDtypeStruct((4, 16, 32), "float32")
    args = ({"q": weight, "k": weight, "v": weight}, x)
    step = traced_jax_step(attention, args, {}, mesh)
    program = condensed(step, named_dimensions(step))
    scores = next(kind for kind in program.values if kind.shape == (4, 16, 16))
    batch, query, key = scores.dimensions
    assert query == key != batch
    assert scores.order.index(1) < scores.order.index(2)


def test_tables_have_rows_of_their_own():
    dims = by_name(found(dlrm(rows=(4096, 512, 512), width=16, batch=64)))
    assert dims["tables.0.weight"][0] != dims["tables.1.weight"][0]
    assert dims["tables.0.weight"][1] == dims["tables.1.weight"][1]
    assert dims["batch.sparse"][0] == dims["batch.dense"][0] == dims["batch.clicks"][0]


@pytest.mark.parametrize(
    ("name", "pattern", "numbers"),
    [
        ("h.11.attn.weight", "h.#.attn.weight", (11,)),
        ("conv1.weight", "conv1.weight", ()),
        ("blocks.0.experts.3.up", "blocks.#.experts.#.up", (0, 3)),
        ("0", "#", (0,)),
    ],
)
def test_numbers_of_layers_are_found(name, pattern, numbers):
    assert layer_pattern(name) == (pattern, numbers)


def test_sets_are_joined():
    union = Union(5)
    union.join(4, 2)
    union.join(2, 1)
    again = union.copy()
    again.join(0, 1)
    assert [union.find(n) for n in range(5)] == [0, 1, 1, 3, 1]
    assert again.find(4) == 0
