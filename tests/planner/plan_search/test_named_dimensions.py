"""Dimensions by following a program: what is alike, what stays apart, layers as one."""

from __future__ import annotations

from benchmarks.planning_models import Family, llama, mlp
from isoshard.core.traced.jax_steps import traced_jax_step
from isoshard.planner.machine.topologies import topology
from isoshard.planner.plan_search.condensed_program import condensed
from isoshard.planner.plan_search.named_dimensions import NamedDimensions, named_dimensions

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
    for layers in (2, 3):
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
