"""Layouts of stacked layers: kept, and given by plans for the layers."""

from __future__ import annotations

import copy

import pytest
from torch import nn

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, make_mesh
from isoshard.core.errors import ShardingError
from isoshard.core.plan import Linear, PlanError
from tests.torch_bridge.loops.decoder_layers import Model, batch, close, one_by_one, stack

MESH = make_mesh((2, 4), ("x", "y"))
RULES = {"blocks.*.qkv.weight": P("y", None), "blocks.*.out.*": Linear(into="y")}


def test_layouts_of_layers_are_kept_behind_the_new_axis():
    layers = stack(2).to("jax")
    for layer in layers:
        xs.mark_sharding(layer.qkv.weight, MESH, ("y", None))
        xs.mark_sharding(layer.norm.weight, MESH, ("x",))
    blocks = xs.scan_layers(layers)
    weight = blocks.layers.qkv.weight
    assert isinstance(weight, nn.Parameter) and isinstance(weight, xs.XLAShardedTensor)
    assert weight.partition_spec == P(None, "y")
    x = iso.shard(batch(), MESH, P("x", None, None))
    blocks(x).sum().backward()
    xs.sync()
    assert iso.to_jax(weight).sharding.spec == P(None, "y")
    assert iso.to_jax(weight.grad).sharding.spec == P(None, "y")
    assert blocks.layers.norm.weight.partition_spec == P(None, "x")
    assert copy.deepcopy(blocks).layers.qkv.weight.partition_spec == P(None, "y")
    blocks.load_state_dict(stack(2).state_dict())
    assert iso.to_jax(weight).sharding.spec == P(None, "y")


def test_layers_that_lie_differently_cannot_be_stacked():
    layers = stack(2).to("jax")
    xs.mark_sharding(layers[1].qkv.weight, MESH, ("y", None))
    match = r"qkv\.weight is not marked in layer 0 and sharded as P.*'y'.* in layer 1"
    with pytest.raises(ValueError, match=match):
        xs.scan_layers(layers)


def test_a_plan_for_the_layers_lays_out_the_stack():
    plan = iso.Plan(RULES, default=P())
    before = iso.shard(Model(stack(4)), MESH, plan)
    after = iso.shard(Model(xs.scan_layers(stack(4))), MESH, plan)
    blocks = xs.scan_layers(before.blocks)
    for name, parameter in blocks.named_parameters():
        other = after.blocks.get_parameter(name)
        assert parameter.partition_spec == other.partition_spec, name
    assert after.blocks.layers.qkv.weight.partition_spec == P(None, "y")
    assert after.blocks.layers.out.weight.partition_spec == P(None, None, "y")
    assert after.blocks.layers.gain.partition_spec == P()
    x = iso.shard(batch(), MESH, P("x", None, None))
    close(after.blocks(x), one_by_one(stack(4), batch()))


def test_rules_by_exact_name_one_spec_and_dictionaries_mean_the_layers_too():
    plan = iso.Plan({f"{n}.out.weight": P("y") for n in range(4)}, default=P())
    blocks = iso.shard(xs.scan_layers(stack(4)), MESH, plan)
    assert blocks.layers.out.weight.partition_spec == P(None, "y")
    names = {f"{n}.out.weight": P("x") for n in range(4)}
    rest = dict.fromkeys(stack(4).state_dict(), P())
    blocks = iso.shard(xs.scan_layers(stack(4)), MESH, rest | names)
    assert blocks.layers.out.weight.partition_spec == P(None, "x")
    blocks = iso.shard(xs.scan_layers(stack(4)), MESH, P("x"))
    assert blocks.layers.out.weight.partition_spec == P(None, "x")


def test_rules_that_tell_layers_apart_or_forget_them_are_refused():
    blocks = xs.scan_layers(stack(4))
    plan = iso.Plan({"2.*": None, "*.qkv.weight": P("y")}, default=P())
    match = r"layers\.qkv\.weight has all.*0\.qkv\.weight is to be P.*'y'.*2\.qkv\.weight.*P\(\)"
    with pytest.raises(ShardingError, match=match):
        iso.shard(blocks, MESH, plan)
    assert blocks.layers.qkv.weight.device.type == "cpu"
    with pytest.raises(PlanError, match=r"\n  3\.qkv\.weight: shape \(24, 8\)"):
        iso.shard(blocks, MESH, iso.Plan({"*.bias": None}, replicate_below=8))
