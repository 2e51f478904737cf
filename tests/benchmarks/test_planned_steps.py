"""Plans that were searched and written by hand train as planned."""

from __future__ import annotations

from benchmarks import planned_steps
from benchmarks.planned_training import (
    MODELS,
    STEPS,
    Training,
    alone,
    hand_layouts,
    received,
    sent,
)


def test_the_found_plan_trains_as_one_device_does_with_the_collectives_told():
    framework = "flax"
    made, _, small = MODELS["MLP"]
    some = made(**small | {"layers": 1})
    layout, told = planned_steps.searched_layout(some, framework)
    _, said = planned_steps.estimated(some, framework, layout)
    training = Training(some, framework, layout)
    losses = [training.step(number) for number in range(STEPS)]
    ran = training.collectives(layout.mesh)
    assert told[0].startswith("mesh (") and layout.mesh.size == 8
    assert losses[0] != losses[-1]
    assert planned_steps.difference(losses, alone(some)) < 1e-6
    assert ran == said and ran.total() > 0


def test_plans_reach_another_process_as_they_are():
    layouts = hand_layouts("Llama")
    again = received(sent(layouts))
    assert {name: one.plan for name, one in again.items()} == {
        name: one.plan for name, one in layouts.items()
    }
    assert all(again[name].mesh == one.mesh for name, one in layouts.items())
