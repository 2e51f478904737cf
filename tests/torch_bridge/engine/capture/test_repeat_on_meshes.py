"""Equal layers as loops on a mesh: stacks are laid out as their layers, with a leading axis."""

from __future__ import annotations

import jax
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, metrics
from isoshard.torch_bridge.engine.compiling.rolled_plan import stacked_layout
from isoshard.torch_bridge.engine.values import sharding_ids
from tests.jax_faults import host_memory_of_the_cpu
from tests.torch_bridge.engine.capture.repeated_models import Training, compare
from tests.torch_bridge.engine.capture.test_repeat import said, stacks

FSDP = iso.Plan.fsdp("y", min_bytes=0)
BOTH = iso.Plan(
    {"*.up.weight": P("y", "x"), "*.up.bias": P("y"), "*.down.weight": P("x", "y"), "*": P()}
)


def placed(mesh, plan):
    """Lays a model out."""

    def place(model):
        iso.shard(model.to("jax"), mesh, plan)

    return place


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def test_stacks_have_the_layouts_of_their_layers(mesh):
    metrics.reset()
    rolled = compare(2, laid=placed(mesh, BOTH), optimizer=momentum)
    assert "3 layers as" in said()
    assert len(stacks(rolled)) >= 12
    weights = [layer.up.weight._storage for layer in rolled.model.layers]
    (stack,) = [one for one in stacks(rolled) if one.storages == weights]
    array = stack.array(lambda *_: None)
    assert array.sharding.spec == P(None, "y", "x")
    assert array.addressable_shards[0].data.shape == (3, 4, 4)
    for layer in rolled.model.layers[1:]:
        for one, first in zip(layer.parameters(), rolled.model.layers[0].parameters(), strict=True):
            assert iso.to_jax(one).sharding == iso.to_jax(first).sharding
    assert iso.to_jax(rolled.model.layers[2].up.weight).sharding.spec == P("y", "x")


def test_training_on_a_mesh_with_checkpoints_and_a_layer_that_is_laid_out_otherwise(mesh, tmp_path):
    def between(number, training):
        path = tmp_path / training.device
        state = {"model": training.model, "optimizer": training.optimizer}
        if number == 0:
            iso.save(path, state)
        if number == 1:
            iso.restore(path, state)
            if training.device == "jax":
                xs.clear_sharding(training.model.layers[1].up.weight)
                xs.mark_sharding(training.model.layers[1].up.weight, mesh, ("x", None))

    rolled = compare(3, between, laid=placed(mesh, FSDP))
    moved = rolled.model.layers[1].up.weight
    assert iso.to_jax(moved).sharding.spec == P("x")
    assert stacks(rolled)
    assert not any(moved._storage in one.storages for one in stacks(rolled))


@pytest.fixture(scope="module")
def wanted():
    """What a step gives on one device."""
    return Training(None, layers=1, device="cpu").run(1)


def uneven(mesh):
    def place(model):
        model.to("jax")
        xs.mark_sharding(model.first.weight, mesh, ("x", None), sizes=(3, 5))

    return place


def on_two_meshes(mesh):
    other = iso.make_mesh((8,), ("all",))

    def place(model):
        iso.shard(model.to("jax"), mesh, FSDP)
        xs.clear_sharding(model.first.weight)
        xs.mark_sharding(model.first.weight, other, ("all", None))

    return place


def explicit(_mesh):
    return placed(jax.make_mesh((2, 4), ("x", "y"), (jax.sharding.AxisType.Explicit,) * 2), FSDP)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (uneven, "arrays in blocks of unequal"),
        (explicit, "arrays on a mesh with Explicit axes"),
        (on_two_meshes, "arrays on a mesh with Explicit axes, or on s"),
    ],
)
def test_a_reason_not_to_take_loops(mesh, wanted, place, reason):
    metrics.reset()
    found = Training("auto", layers=1, place=place(mesh)).run(1)
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=1e-5)
    assert said().startswith(f"repeat: not rolled: it has {reason}")


@host_memory_of_the_cpu
def test_offloaded_state_is_a_reason(mesh):
    plan = iso.Plan({"*.weight": ("y",), "*": P()}, memory={"state.*": "pinned_host"})
    metrics.reset()
    training = Training("auto", layers=1, optimizer=momentum, place=placed(mesh, plan))
    iso.shard(training.optimizer, mesh, plan)
    wanted = Training(None, layers=1, optimizer=momentum, device="cpu").run(2)
    torch.testing.assert_close(training.run(2), wanted, rtol=2e-4, atol=1e-5)
    assert said().startswith("repeat: not rolled: it has arrays in host memory")


def test_layout_numbers_of_stacks(mesh):
    number = sharding_ids.intern(jax.NamedSharding(mesh, P("x")))
    assert sharding_ids.sharding(stacked_layout(number)).spec == P(None, "x")
    assert stacked_layout(sharding_ids.UNPLACED) == sharding_ids.UNPLACED
