"""Within a few percent of the limit: a plan that fits is found, and none that does not is given."""

from __future__ import annotations

from jax.sharding import NamedSharding

from benchmarks.planning_models import llama
from benchmarks.planning_search import costs_by_hand
from isoshard.core.planner.machine.topologies import topology
from isoshard.core.planner.plan_search.hand_plans import hand_plans
from isoshard.core.planner.plan_search.plan_cost import cost_of
from isoshard.core.planner.plan_search.search_result import SearchResult
from isoshard.core.planner.plan_search.searched_step import SearchedStep, searched
from isoshard.core.planner.plan_search.searching import search
from isoshard.core.planner.traced.jax_steps import traced_jax_step
from tests.core.planner.plan_search.test_searched_step import GROUPED

MESH = topology("v5e:2x4").mesh((4, 2), ("data", "model"))


def outputs_of(found: SearchResult, step: SearchedStep) -> dict[str, NamedSharding]:
    """Layouts of outputs of modules as a bridge would read them from the plan."""
    outputs = {}
    for name, alike in step.modules.items():
        said = found.plan.activation_for(name)
        if said is not None:
            shape = step.program.values[step.program.modules[alike]].shape
            outputs[name] = said.resolve("output", {"": shape}, found.mesh)[""]
    return outputs


def test_what_the_leanest_hand_plan_needs_is_enough():
    family = llama(layers=2, **GROUPED)
    step = searched(traced_jax_step(family.step, family.args, {}, MESH))
    hand = []  # what each hand plan costs, with the most memory that a check of it finds
    for one in hand_plans(step.written, [MESH]):
        if "FSDP" not in one.name:
            continue  # these need the least
        for cost, outputs in costs_by_hand(step, one, 10**12, "trace"):
            hand.append(step.as_written(cost, one.layouts, MESH, outputs))
    most = int(1.02 * min(one.memory for one in hand))
    found = search(step.written, None, MESH, memory=most)
    fastest = min(one.seconds for one in hand if one.memory <= most)
    assert found.cost.seconds <= 1.05 * fastest
    params, _, batch = family.args
    layouts = found.plan.resolve(params, MESH, strict=True).shardings
    layouts |= found.plan.for_inputs().resolve({"batch": batch}, MESH).shardings
    written = cost_of(step.written, layouts, MESH, most, outputs=outputs_of(found, step))
    assert written.memory <= found.cost.memory <= most  # with layers written out
