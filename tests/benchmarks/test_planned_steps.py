"""Plans that were searched and written by hand train as planned, in torch and in NNX."""

from __future__ import annotations

import pytest

from benchmarks import planned_sizes, planned_steps, planned_tables
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
from tools.harness import calls

BOTH = pytest.mark.parametrize("framework", FRAMEWORKS)


def twins(model):
    made, _, small = MODELS[model]
    return made(**small)


@BOTH
@pytest.mark.parametrize("model", MODELS)
def test_the_found_plan_trains_as_one_device_does_with_the_collectives_that_were_told(
    model, framework
):
    some = twins(model)
    layout, told = planned_steps.found_layout(some, framework)
    _, said = planned_steps.told(some, framework, layout)
    training = Training(some, framework, layout)
    losses = [training.step(number) for number in range(STEPS)]
    ran = training.collectives(layout.mesh)
    assert told[0].startswith("mesh (") and layout.mesh.size == 8
    assert losses[0] != losses[-1]
    assert planned_steps.apart(losses, alone(some)) < 1e-6
    assert ran == said and ran.total() > 0


@BOTH
def test_six_hand_plans_are_told_trained_and_timed_in_processes(framework):
    _, _, small = MODELS["MLP"]
    facts = planned_steps.measure("MLP", framework, small, rounds=1, processes=2)
    rows = facts["rows"]
    assert len(rows) == 7 and facts["best by hand"] in rows
    assert all(row["apart"] < 1e-6 for row in rows.values())
    assert {name: row["differ"] for name, row in rows.items()} == dict.fromkeys(rows, 0)
    assert all(0 < row["best_ms"] <= row["step_ms"] <= row["median_ms"] for row in rows.values())
    assert all(len(row["processes_ms"]) == 2 for row in rows.values())
    assert min(facts["again, processes"]) <= facts["again"] <= max(facts["again, processes"])
    assert set(facts["spearman"]) == {"trace", "partition"} and facts["again"] > 0
    table, *lines = planned_tables.shown("MLP", facts)
    assert table.row_count == 7 and any("one plan twice" in line for line in lines)
    written = planned_tables.markdown({f"MLP-{framework}": facts})
    word = {"torch": "torch", "flax": "NNX"}[framework]
    assert f'| MLP, ms a step | {word}: "trace" | "partition" | measured |\n' in written
    assert written.count("\n| ") == 7 + 1 + 1 and f"| MLP-{framework} |" in written


def test_a_process_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(planned_steps, "LIMIT", 0.5)
    _, _, small = MODELS["MLP"]
    with pytest.raises(calls.Failed, match=r"took more than 0 s|took more than 1 s"):
        planned_steps.measure("MLP", "torch", small, rounds=1, processes=1)


def test_plans_reach_another_process_as_they_are():
    layouts = hand_layouts("Llama")
    again = received(sent(layouts))
    assert {name: one.plan for name, one in again.items()} == {
        name: one.plan for name, one in layouts.items()
    }
    assert all(again[name].mesh == one.mesh for name, one in layouts.items())


def test_sizes_that_are_used_are_among_those_that_were_tried():
    for name, (words, tried) in planned_sizes.TRIED.items():
        assert len(set(tried)) == 8
        assert tuple(MODELS[name][1][word] for word in words) in tried


def test_sizes_are_judged_by_the_plans_that_are_told_nearest():
    _, _, small = MODELS["MLP"]
    told = planned_sizes.predicted("MLP", small)
    assert set(told) == set(hand_layouts("MLP")) and min(told.values()) > 0
    first, second = sorted(told.values())[:2]
    assert planned_sizes.apart([first, second]) == pytest.approx(second / first - 1)
    assert planned_sizes.apart(list(told.values())) <= second / first - 1


def test_losses_of_another_training_are_apart():
    assert planned_steps.apart([1.0, 2.0], [1.0, 2.5]) == pytest.approx(0.2)


def test_square_layers_are_split_in_turn_though_an_optimizer_updates_them_in_one_loop():
    square = chain(layers=4, width=64, inner=64, batch=32)
    layout = hand_layouts("MLP")["data"]
    step, args = planned(square, "torch", layout)
    found = searched(traced_step(step, args, {}, layout.mesh, None))
    groups = [one for one in found.program.dimensions.groups if one.role == "parameter"]
    assert groups and all(len(set(one.dimensions)) == 2 for one in groups)
