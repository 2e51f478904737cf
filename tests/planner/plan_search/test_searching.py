"""The plan that is found: good, within memory, readable, the same each time."""

from __future__ import annotations

import dataclasses
import functools

import jax
import pytest
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError
from isoshard.core.plan import Plan, PlanError
from isoshard.planner.estimating import estimate
from isoshard.planner.machine.topologies import topology
from isoshard.planner.plan_search.analytic_cost import is_tiny
from isoshard.planner.plan_search.plan_cost import PlanCost
from isoshard.planner.plan_search.search_result import NothingFitsError, SearchResult, why_lost
from isoshard.planner.plan_search.searching import search
from tests import fresh
from tests.benchmarks.test_hand_plans import over_by_hand
from tests.planner.plan_search.small_families import SMALL, program, traced

MESH = topology("v5e:2x4").mesh((2, 4), ("data", "model"))


@functools.cache
def found(name: str) -> SearchResult:
    return search(traced(name), None, "v5e:2x4" if name == "MLP" else MESH, depth="kinds")


def test_every_parameter_has_a_rule_and_what_is_printed_is_short():
    name = "Llama"
    result = found(name)
    params, _, batch = SMALL[name]().args
    resolved = result.plan.resolve(params, result.mesh, strict=True)
    assert not resolved.unmatched and not resolved.unused
    for leaf in resolved.leaves:
        leaf.sharding.shard_shape(leaf.shape)
    assert result.plan.for_inputs().resolve({"batch": batch}, result.mesh).leaves
    assert len(result.plan.rules) <= 14
    assert over_by_hand(name, MESH, "kinds", result) <= 1.05
    text = str(result).splitlines()
    assert " on a device, at most " in text[0] and " of 14.9 GiB" in text[0]
    assert len(text) <= 30 and max(map(len, text)) <= 160
    for one in result.plan.rules:
        assert any(one[0] in line for line in text) or any(" more: " in line for line in text)


def test_another_process_finds_the_same(tmp_path):
    """Hashes of names differ from process to process; the order of nothing may hang on them."""
    code = (
        "from tests.planner.plan_search.small_families import traced\n"
        "from isoshard.planner.plan_search.searching import search\n"
        "found = search(traced('MLP'), None, 'v5e:2x4', depth='kinds')\n"
        "print(str(found).rpartition(' in ')[0])\n"
    )
    done = fresh.run(code, cwd=tmp_path, env={"PYTHONPATH": str(fresh.ROOT)})
    assert done.stdout.strip() == str(found("MLP")).rpartition(" in ")[0].strip(), done.stderr
    assert "choices" in done.stdout


def test_runners_up_say_why_they_lost():
    result = found("MLP")
    assert result.runners_up
    for one in result.runners_up:
        assert "% slower, " in one.why or "as fast" in one.why or " more than its " in one.why
        assert "data splits " in one.idea
    ideas = [result.idea, *(one.idea for one in result.runners_up)]
    assert len(set(ideas)) > 1
    text = str(result)
    assert "not mesh (" in text and "choices in" in text and "  inputs" in text


def test_less_memory_splits_more():
    roomy = found("MLP")
    memory = roomy.cost.memory * 3 // 4
    tight = search(traced("MLP"), None, roomy.mesh, memory=memory, depth="kinds")
    assert tight.cost.memory <= memory
    assert tight.cost.seconds >= roomy.cost.seconds


def test_small_parameters_do_not_rest_split():
    result = found("Llama")
    specs = result.plan.resolve(SMALL["Llama"]().args[0], result.mesh).specs
    kept = [n for n, group in enumerate(program("Llama").dimensions.groups) if is_tiny(group)]
    names = [name for n in kept for name in program("Llama").dimensions.groups[n].names]
    assert any("norm" in name for name in names)
    assert all("data" not in str(specs[name]) for name in names if name in specs)


def test_rules_of_ones_own_have_axes_of_the_mesh():
    own, said = (
        Plan({"*.up_proj.weight": ("tp",)}),
        r"fixed= does not match the mesh \(data=2, mo",
    )
    with pytest.raises(PlanError, match=said) as e:
        search(traced("Llama"), None, MESH, fixed=own, depth="kinds")
    assert "tp" in str(e.value) and "Name one of its axes" in str(e.value)


def test_nothing_fits_says_by_how_much_and_what_helps():
    with pytest.raises(NothingFitsError) as caught:
        search(traced("MLP"), None, "v5e:2x4", memory=1 << 20, depth="kinds")
    assert isinstance(caught.value, ShardingError)
    text = str(caught.value)
    assert "MLP: no plan fits in the 1.0 MiB of a device. The least needs" in text
    assert "too much" in text and "more devices (about" in text and "not 8" in text
    assert "bfloat16" in text and "a smaller batch" in text


def test_a_machine_that_is_not_there():
    with pytest.raises(ShardingError, match="there is no chip 'v9x'"):
        search(traced("Llama"), None, "v9x:2x4")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"memory": 0}, "memory= is the bytes that one device may use"),
        (
            {"depth": "compile"},
            r"depth= must be 'kinds', 'trace', 'partition', not 'compile'; .* iso.pl",
        ),
        ({"candidates": 0}, "candidates= is the number of plans to report, 1 or more: 0"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_before_it_begins(wrong, message):
    with pytest.raises(ValueError, match=message):
        search(None, None, "v5e:2x4", **wrong)


def test_plan_auto_gives_the_plan_with_rules_of_ones_own():
    family = SMALL["MLP"]()
    mesh = MESH
    own = Plan({"layers.0.weight": (None, "model")}, inputs=("data",))
    plan = Plan.auto(family.step, family.args, mesh, fixed=own)
    assert isinstance(plan, Plan) and plan.rules[0] == ("layers.0.weight", (None, "model"))
    assert plan.spec_for("layers.0.weight", (64, 64), mesh) == P(None, "model")
    assert dict(plan.inputs) == {"*": ("data",)}
    assert len(plan.rules) > 1 and plan.resolve(family.args[0], mesh, strict=True).leaves
    with pytest.raises(ShardingError, match=r"Plan.auto needs a mesh.*iso.planner.search finds"):
        Plan.auto(family.step, family.args, "v5e:2x4")


def test_by_the_partitioner_memory_is_what_estimate_tells():
    family = SMALL["MLP"]()
    mesh = MESH
    found = search(family.step, family.args, mesh, depth="partition", candidates=1)
    how = {"depth": "partition", "progress": False}
    report = estimate(family.step, family.args, mesh, found.plan, **how)
    assert found.cost.depth == "partition" and found.cost.fits
    assert report.memory.peak <= found.cost.memory
    assert found.least_seconds <= found.cost.seconds


def test_a_step_without_batch_or_state():
    def norm(params):
        return jax.tree.map(lambda p: p / (1 + (p * p).sum()), params)

    params = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}
    result = search(norm, (params,), MESH, depth="kinds")
    assert result.plan.resolve(params, result.mesh, strict=True).leaves


def test_a_plan_that_computes_and_talks_less_may_still_be_slower():
    best = PlanCost(1.0, 0.9, {"data": 0.4}, 10, 20, "trace")
    slower = dataclasses.replace(best, seconds=1.1, collectives={"data": 0.3})
    assert why_lost(slower, best) == "10.0% slower, less of its collectives overlaps with computing"
    talking = dataclasses.replace(slower, collectives={"data": 0.6})
    assert why_lost(talking, best) == "10.0% slower, 200 ms more of collectives along data"
