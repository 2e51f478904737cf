"""Equal layers as loops on a mesh: stacks are laid out as their layers, with a leading axis."""

from __future__ import annotations

import jax
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, metrics
from isoshard.torch_bridge.engine.compiling.rolled_plan import stacked_layout
from isoshard.torch_bridge.engine.values import layout_numbers
from tests.jax_faults import host_memory_of_the_cpu
from tests.torch_bridge.engine.capture.repeated_models import Training, compare
from tests.torch_bridge.engine.capture.test_repeat import said, stacks

PLANS = {
    "fsdp": iso.Plan.fsdp("y", min_bytes=0),
    "tensor": iso.Plan(
        {"*.up.weight": P("y", None), "*.up.bias": P("y"), "*.down.weight": P(None, "y"), "*": P()}
    ),
    "both": iso.Plan(
        {"*.up.weight": P("y", "x"), "*.up.bias": P("y"), "*.down.weight": P("x", "y"), "*": P()}
    ),
}


def placed(mesh, plan):
    """Lays a model out."""

    def place(model):
        iso.shard(model.to("jax"), mesh, plan)

    return place


@pytest.mark.parametrize("name", PLANS)
def test_plans(mesh, name):
    metrics.reset()
    rolled = compare(5, place=placed(mesh, PLANS[name]))
    assert "4 layers as" in said()
    assert len(stacks(rolled)) >= 12
    for layer in rolled.model.layers[1:]:
        for one, first in zip(layer.parameters(), rolled.model.layers[0].parameters(), strict=True):
            assert iso.to_jax(one).sharding == iso.to_jax(first).sharding


def test_stacks_have_the_layouts_of_their_layers(mesh):
    rolled = Training("auto", place=placed(mesh, PLANS["both"]))
    rolled.step(torch.ones(8, 3, device="jax"))
    weights = [layer.up.weight._storage for layer in rolled.model.layers]
    (stack,) = [one for one in stacks(rolled) if one.storages == weights]
    array = stack.array(lambda *_: None)
    assert array.sharding.spec == P(None, "y", "x")
    assert iso.to_jax(rolled.model.layers[2].up.weight).sharding.spec == P("y", "x")
    assert array.addressable_shards[0].data.shape == (4, 4, 4)


def test_batches_on_the_mesh(mesh):
    def between(number, training):
        x = iso.shard(torch.ones(8, 3).to("jax"), mesh, P("x"))
        return training.evaluate(x).cpu().clone()

    compare(4, between, place=placed(mesh, PLANS["fsdp"]))


def test_dropout_on_the_mesh(mesh):
    compare(3, dropout=0.2, place=placed(mesh, PLANS["fsdp"]))


def test_a_layer_that_is_laid_out_otherwise_leaves(mesh):
    def between(number, training):
        if number == 1:
            xs.clear_sharding(training.model.layers[1].up.weight)
            xs.mark_sharding(training.model.layers[1].up.weight, mesh, ("x", None))

    rolled = compare(4, between, place=placed(mesh, PLANS["fsdp"]))
    moved = rolled.model.layers[1].up.weight
    assert iso.to_jax(moved).sharding.spec == P("x")
    assert not any(moved._storage in one.storages for one in stacks(rolled))


def test_checkpoints_of_a_mesh(mesh, tmp_path):
    def between(number, training):
        path = tmp_path / ("rolled" if training.step.repeat else "plain")
        state = {"model": training.model, "optimizer": training.optimizer}
        if number == 1:
            iso.save(path, state)
        if number == 2:
            iso.restore(path, state)

    rolled = compare(4, between, place=placed(mesh, PLANS["fsdp"]))
    assert stacks(rolled)


def test_uneven_blocks_are_a_reason(mesh):
    def place(model):
        model.to("jax")
        xs.mark_sharding(model.first.weight, mesh, ("x", None), sizes=(3, 5))

    metrics.reset()
    compare(2, place=place)
    assert said().startswith("repeat: not rolled: it has arrays in blocks of unequal")


@host_memory_of_the_cpu
def test_offloaded_state_is_a_reason(mesh):
    plan = iso.Plan({"*.weight": ("y",), "*": P()}, memory={"state.*": "pinned_host"})
    metrics.reset()
    found = []
    for repeat in (None, "auto"):
        training = Training(repeat, place=placed(mesh, plan))
        iso.shard(training.optimizer, mesh, plan)
        found.append(training.run(2))
    torch.testing.assert_close(*found)
    assert said().startswith("repeat: not rolled: it has arrays that rest in host memory")


def test_explicit_axes_are_a_reason():
    mesh = jax.make_mesh((2, 4), ("x", "y"), (jax.sharding.AxisType.Explicit,) * 2)
    metrics.reset()
    compare(2, place=placed(mesh, PLANS["fsdp"]))
    assert said().startswith("repeat: not rolled: it has arrays on a mesh with Explicit axes")


def test_several_meshes_are_a_reason(mesh):
    other = iso.make_mesh((8,), ("all",))

    def place(model):
        iso.shard(model.to("jax"), mesh, PLANS["fsdp"])
        xs.clear_sharding(model.first.weight)
        xs.mark_sharding(model.first.weight, other, ("all", None))

    metrics.reset()
    compare(2, place=place)
    assert said().startswith(
        "repeat: not rolled: it has arrays on a mesh with Explicit axes, or on s"
    )


def test_layout_numbers_of_stacks(mesh):
    number = layout_numbers.intern(jax.NamedSharding(mesh, P("x")))
    assert layout_numbers.sharding(stacked_layout(number)).spec == P(None, "x")
    assert stacked_layout(layout_numbers.UNPLACED) == layout_numbers.UNPLACED
