"""What is found costs at most what the best hand plan does, by one cost function."""

from __future__ import annotations

from jax.sharding import Mesh

from benchmarks.hand_plans import hand_plans
from benchmarks.planning_search import best_by_hand, by_hand
from isoshard.planner.machine.topologies import topology
from isoshard.planner.plan_search.plan_cost import SearchDepth, cost_of
from isoshard.planner.plan_search.search_result import SearchResult
from isoshard.planner.plan_search.searched_step import searched
from isoshard.planner.plan_search.searching import search
from tests.planner.plan_search.small_families import SMALL, traced


def over_by_hand(name: str, where: str | Mesh, depth: SearchDepth, found: SearchResult) -> float:
    assert found.cost.fits
    assert found.least_seconds <= found.cost.seconds
    hand = by_hand(traced(name), SMALL[name](), where)
    plan, cost = best_by_hand(searched(traced(name)), hand, found.cost.capacity, depth)
    assert plan is not None and cost is not None
    return found.cost.seconds / cost.seconds


def test_no_hand_plan_is_better():
    """And activations are said where they help. By kinds `test_searching` says so."""
    name, where = "MLP", "v5e:2x4"
    found = search(traced(name), None, where, depth="trace", candidates=2)
    assert over_by_hand(name, where, "trace", found) <= 1.05
    params, _, batch = SMALL[name]().args
    layouts = found.plan.resolve(params, found.mesh).shardings
    layouts |= found.plan.for_inputs().resolve({"batch": batch}, found.mesh).shardings
    without = cost_of(traced(name), layouts, found.mesh, found.cost.capacity).seconds
    assert found.cost.depth == "trace" and found.cost.seconds <= 1.000001 * without
    assert not found.plan.activations or found.cost.seconds < without


def test_the_hand_plans_are_those_that_people_write():
    mesh = topology("v5e:2x4").mesh((2, 4), ("data", "model"))
    alone = topology("v5e:2x4").mesh((8,), ("data",))
    names = {(one.name, one.mesh.size) for one in hand_plans(traced("Mixtral"), [mesh, alone])}
    assert {name for name, _ in names} == {
        *("data", "FSDP", "tensor", "FSDP x tensor", "sequence", "expert", "expert x FSDP")
    }
    found = {one.name: one for one in hand_plans(traced("Llama"), [mesh])}
    weight = found["FSDP x tensor"].layouts["layers.0.mlp.up_proj.weight"].spec
    assert tuple(weight) == ("model", "data")
    assert tuple(found["sequence"].layouts["batch.tokens"].spec) == ("data", "model")
