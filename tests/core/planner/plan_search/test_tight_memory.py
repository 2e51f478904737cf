"""Within a few percent of the limit: a plan that fits is found, and none that does not is given."""

from __future__ import annotations

import functools

import pytest

from benchmarks.planning_models import Family, gpt2, llama
from benchmarks.planning_search import costs_by_hand
from isoshard.core.planner.machine.topologies import topology
from isoshard.core.planner.plan_search import searching
from isoshard.core.planner.plan_search.hand_plans import hand_plans
from isoshard.core.planner.plan_search.plan_cost import PlanCost, SearchDepth, cost_of
from isoshard.core.planner.plan_search.searched_step import SearchedStep, searched
from isoshard.core.planner.plan_search.searching import search
from isoshard.core.planner.traced.jax_steps import traced_jax_step
from tests.core.planner.plan_search.test_searched_step import GROUPED, SIZES, outputs_of

MESH = topology("v5e:2x4").mesh((4, 2), ("data", "model"))
FAMILIES = {"GPT-2": lambda: gpt2(layers=6, **SIZES), "Llama": lambda: llama(layers=4, **GROUPED)}
ROOM = 1.02


@functools.cache
def family(name: str) -> Family:
    return FAMILIES[name]()


@functools.cache
def followed(name: str) -> SearchedStep:
    one = family(name)
    return searched(traced_jax_step(one.step, one.args, {}, MESH, name=name))


@functools.cache
def by_hand(name: str, depth: SearchDepth) -> list[PlanCost]:
    """What each hand plan costs, with the most memory that a check of it finds."""
    step, found = followed(name), []
    for one in hand_plans(step.written, [MESH]):
        for cost, outputs in costs_by_hand(step, one, 10**12, "trace"):
            checked = step.as_written(cost, one.layouts, MESH, outputs)
            if depth == "partition":
                split = step.cost(one.layouts, MESH, 10**12, outputs, depth)
                memory = max(checked.memory, split.memory)
                checked = PlanCost(
                    split.seconds, split.busy, split.collectives, memory, 10**12, depth
                )
            found.append(checked)
    return sorted(found, key=lambda one: one.memory)


@pytest.mark.parametrize("depth", ["trace", "partition"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_the_leanest_hand_plan_needs_is_enough(name, depth, monkeypatch):
    counted = {"checked": 0, "partitioned": 0}

    def counting(what, function):
        def counts(*args):
            counted[what] += 1
            return function(*args)

        return counts

    for what in counted:
        monkeypatch.setattr(searching, what, counting(what, getattr(searching, what)))
    hand = by_hand(name, depth)
    most = int(ROOM * hand[0].memory)
    found = search(followed(name).written, None, MESH, memory=most, depth=depth)
    fastest = min(one.seconds for one in hand if one.memory <= most)
    assert found.cost.seconds <= 1.05 * fastest
    assert peak(name, found, depth) <= found.cost.memory <= most
    assert counted["checked"] <= 8
    assert counted["partitioned"] <= (4 if depth == "partition" else 0)


def peak(name: str, found: searching.SearchResult, depth: SearchDepth) -> int:
    """What the found plan needs, read from its rules: as written, and as it was searched."""
    step = followed(name)
    params, _, batch = family(name).args
    layouts = found.plan.resolve(params, MESH, strict=True).shardings
    layouts |= found.plan.for_inputs().resolve({"batch": batch}, MESH).shardings
    outputs = outputs_of(found, step)
    written = cost_of(step.written, layouts, MESH, 1, outputs=outputs)
    looped = cost_of(
        step.looped if depth == "trace" else step.written, layouts, MESH, 1,
        outputs=outputs, depth=depth, loops=depth == "partition",
    )  # fmt: skip
    return max(written.memory, looped.memory)
