"""Plans that were searched and written by hand train as planned, in torch and in NNX."""

from __future__ import annotations

import pytest

from benchmarks import planned_steps, planned_tables
from benchmarks.models.twins import chain
from benchmarks.planned_steps import FRAMEWORKS, MODELS
from isoshard.core.planner.plan_search.searched_step import searched
from isoshard.core.planner.traced.of_step import traced_step

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
    row, _ = planned_steps.trained(some, framework, layout, planned_steps.alone(some))
    assert told[0].startswith("mesh (") and layout.mesh.size == 8
    assert len(row["losses"]) == 5 and row["losses"][0] != row["losses"][-1]
    assert row["apart"] < 1e-6
    assert (row["ran only"], row["said only"]) == ([], []) and row["collectives"] > 0


@BOTH
def test_six_hand_plans_are_told_trained_and_timed(framework):
    facts = planned_steps.measure(twins("MLP"), framework, rounds=1)
    rows = facts["rows"]
    assert len(rows) == 7 and facts["best by hand"] in rows
    assert all(row["apart"] < 1e-6 for row in rows.values())
    assert {name: row["differ"] for name, row in rows.items()} == dict.fromkeys(rows, 0)
    assert all(0 < row["best_ms"] <= row["step_ms"] <= row["median_ms"] for row in rows.values())
    assert set(facts["spearman"]) == {"trace", "partition"} and facts["again"] > 0
    table, *lines = planned_tables.shown("MLP", facts)
    assert table.row_count == 7 and any("one plan twice" in line for line in lines)
    written = planned_tables.markdown({f"MLP-{framework}": facts})
    word = {"torch": "torch", "flax": "NNX"}[framework]
    assert f'| MLP, ms a step | {word}: "trace" | "partition" | measured |\n' in written
    assert written.count("\n| ") == 7 + 1 + 1 and f"| MLP-{framework} |" in written


def test_losses_of_another_training_are_apart():
    assert planned_steps.apart([1.0, 2.0], [1.0, 2.5]) == pytest.approx(0.2)


def test_square_layers_are_split_in_turn_though_an_optimizer_updates_them_in_one_loop():
    square = chain(layers=4, width=64, inner=64, batch=32)
    layout = planned_steps.hand_layouts("MLP")["data"]
    step, args = planned_steps.planned(square, "torch", layout)
    found = searched(traced_step(step, args, {}, layout.mesh, None))
    groups = [one for one in found.program.dimensions.groups if one.role == "parameter"]
    assert groups and all(len(set(one.dimensions)) == 2 for one in groups)
