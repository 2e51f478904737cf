"""Plans that were searched and written by hand train as planned, in torch and in NNX."""

from __future__ import annotations

import pytest

from benchmarks import planned_steps
from benchmarks.models.twins import chain
from benchmarks.planned_training import (
    FRAMEWORKS,
    MODELS,
    STEPS,
    Training,
    alone,
    hand_layouts,
    planned,
    received,
    sent,
)
from isoshard.core.planner.plan_search.searched_step import searched
from isoshard.core.planner.traced.of_step import traced_step


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_found_plan_trains_as_one_device_does_with_the_collectives_told(framework):
    made, _, small = MODELS["MLP"]
    some = made(**small | {"layers": 1})
    layout, told = planned_steps.found_layout(some, framework)
    _, said = planned_steps.told(some, framework, layout)
    training = Training(some, framework, layout)
    losses = [training.step(number) for number in range(STEPS)]
    ran = training.collectives(layout.mesh)
    assert told[0].startswith("mesh (") and layout.mesh.size == 8
    assert losses[0] != losses[-1]
    assert planned_steps.apart(losses, alone(some)) < 1e-6
    assert ran == said and ran.total() > 0


def test_plans_reach_another_process_as_they_are():
    layouts = hand_layouts("Llama")
    again = received(sent(layouts))
    assert {name: one.plan for name, one in again.items()} == {
        name: one.plan for name, one in layouts.items()
    }
    assert all(again[name].mesh == one.mesh for name, one in layouts.items())


def test_square_layers_are_split_in_turn_though_an_optimizer_updates_them_in_one_loop():
    square = chain(layers=4, width=64, inner=64, batch=32)
    layout = hand_layouts("MLP")["data"]
    step, args = planned(square, "torch", layout)
    found = searched(traced_step(step, args, {}, layout.mesh, None))
    groups = [one for one in found.program.dimensions.groups if one.role == "parameter"]
    assert groups and all(len(set(one.dimensions)) == 2 for one in groups)
