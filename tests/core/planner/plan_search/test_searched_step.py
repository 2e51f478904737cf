"""Equal layers are followed once: as much work for many as for few, and the same answer."""

from __future__ import annotations

import collections
import contextlib
import functools

import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.planning_models import Family, gpt2, llama, mlp
from isoshard.core.planner.machine.topologies import topology
from isoshard.core.planner.plan_search import named_dimensions as dimensions_module
from isoshard.core.planner.plan_search import plan_cost, searching
from isoshard.core.planner.plan_search.named_dimensions import named_dimensions
from isoshard.core.planner.plan_search.plan_cost import cost_of
from isoshard.core.planner.plan_search.search_result import NothingFitsError, SearchResult
from isoshard.core.planner.plan_search.searched_step import SearchedStep, searched
from isoshard.core.planner.plan_search.searching import search
from isoshard.core.planner.traced.jax_steps import traced_jax_step
from isoshard.core.planner.traced.traced_step import TracedStep

SIZES = {"width": 512, "heads": 8, "batch": 32, "length": 64, "vocabulary": 4096}
GROUPED = SIZES | {"inner": 1024, "kv_heads": 4}


def mesh():
    return topology("v5e:2x4").mesh((2, 4), ("data", "model"))


@functools.cache
def traced(layers: int) -> TracedStep:
    return of(llama(layers=layers, **GROUPED))


def of(family: Family) -> TracedStep:
    return traced_jax_step(family.step, family.args, {}, mesh(), name=family.name)


@functools.cache
def followed(layers: int) -> SearchedStep:
    return searched(traced(layers))


def equations(program) -> int:
    """How many there are, those inside of others too."""
    inner = (
        getattr(one, "jaxpr", one)
        for equation in program.eqns
        for value in equation.params.values()
        for one in (value if isinstance(value, tuple | list) else (value,))
        if hasattr(getattr(one, "jaxpr", one), "eqns")
    )
    return len(program.eqns) + sum(equations(one) for one in inner)


def outputs_of(found: SearchResult, step: SearchedStep) -> dict[str, NamedSharding]:
    """Layouts of outputs of modules as a bridge would read them from the plan."""
    outputs = {}
    for name, alike in step.modules.items():
        said = found.plan.activation_for(name)
        if said is not None:
            shape = step.program.values[step.program.modules[alike]].shape
            outputs[name] = said.resolve("output", {"": shape}, found.mesh)[""]
    return outputs


def test_groups_are_those_of_the_step_as_written():
    step = followed(6)
    assert step.looped is not step.written
    sizes = [equations(one.program.jaxpr) for one in (step.looped, step.written)]
    assert sizes[0] < sizes[1] / 2
    written = named_dimensions(step.written)

    def alike(found):
        first: dict[int, int] = {}
        return {
            (tuple(sorted(group.names)), group.role, group.shape): tuple(
                first.setdefault(one, len(first)) for one in group.dimensions
            )
            for group in sorted(found.groups, key=lambda group: min(group.names))
        }

    assert alike(step.program.dimensions) == alike(written)


def test_every_module_is_marked_by_one_in_the_loop():
    step = followed(6)
    names = {f"layers.{n}.self_attn.q_proj" for n in range(6)}
    assert names <= set(step.modules)
    assert len({step.modules[name] for name in names}) < 6
    assert set(step.modules.values()) <= set(step.program.modules)
    assert all(f"layers.{n}" in step.modules for n in range(6))


def test_what_is_followed_does_not_grow_with_depth(monkeypatch):
    """Counted in equations: all that the search follows, and what it traces as written once."""
    counts = collections.defaultdict[int, list[int]](list)
    now = 0
    flattened, by_tracing = dimensions_module.flattened, plan_cost.by_tracing

    def counted_flattened(program):
        counts[now].append(equations(program.jaxpr))
        return flattened(program)

    def counted_tracing(step):
        counts[now].append(equations(step.program.jaxpr))
        return by_tracing(step)

    monkeypatch.setattr(dimensions_module, "flattened", counted_flattened)
    monkeypatch.setattr(plan_cost, "by_tracing", counted_tracing)
    evaluated = {}
    for now in (8, 16):
        evaluated[now] = search(traced(now), None, mesh(), candidates=2).evaluated
    looped = {}
    for layers, found in counts.items():
        deep = equations(traced(layers).program.jaxpr)
        looped[layers] = [one for one in found if one < deep / 2]
        written = [one for one in found if one >= deep / 2]
        assert 1 <= len(written) <= 2, "what was found is checked with its layers written out"
        assert max(written) >= deep
    assert max(looped[16]) == max(looped[8])
    looks = 3 * (5 * searching.PLAIN + 2 * searching.LOOKED + searching.STEPS * searching.AROUND)
    assert all(len(found) <= 2 + looks for found in looped.values())
    assert evaluated[16] <= 1.2 * evaluated[8]


def test_a_chain_that_may_alternate_is_followed_as_it_is_written():
    step = searched(of(mlp(layers=8, width=512, batch=512)))
    assert step.looped is step.written
    first, second = next(
        group.dimensions
        for group in step.program.dimensions.groups
        if group.names[0] == "layers.0.weight"
    )
    assert first != second


def test_a_step_without_layers_is_itself():
    step = searched(traced(2))
    assert step.looped is step.written


@pytest.mark.parametrize("with_outputs", [False, True])
def test_collectives_and_memory_with_loops_are_near_those_written_out(with_outputs):
    step = followed(6)
    layouts = {
        one.name: NamedSharding(mesh(), P("data") if one.role == "input" else P())
        for one in step.written.inputs
        if one.role in ("parameter", "input")
    }
    outputs = {n: NamedSharding(mesh(), P("data")) for n in step.modules} if with_outputs else None
    looped = step.cost(layouts, mesh(), 10**10, outputs)
    written = cost_of(step.written, layouts, mesh(), 10**10, outputs=outputs)
    assert looped.collectives == pytest.approx(dict(written.collectives), rel=0.05)
    assert looped.memory == pytest.approx(written.memory, rel=0.2)
    assert step.as_written(looped, layouts, mesh(), outputs).memory >= written.memory


def test_the_found_plan_fits_with_its_layers_written_out():
    family = gpt2(layers=6, **SIZES)
    step = of(family)
    roomy = search(step, None, mesh(), candidates=2)
    limits = [roomy.cost.memory * percent // 100 for percent in (100, 98, 95)]
    found = [(roomy, roomy.cost.memory)]
    for most in limits:
        with contextlib.suppress(NothingFitsError):
            found.append((search(step, None, mesh(), candidates=2, memory=most), most))
    assert found[1][1] == limits[0]
    for plan, most in found:
        params, _, batch = family.args
        layouts = plan.plan.resolve(params, plan.mesh, strict=True).shardings
        inputs = plan.plan.for_inputs().resolve({"batch": batch}, plan.mesh).shardings
        outputs = outputs_of(plan, searched(step))
        written = cost_of(step, layouts | inputs, plan.mesh, most, outputs=outputs)
        assert written.memory <= plan.cost.memory <= most


def test_what_only_seems_to_fit_with_layers_as_loops_is_not_called_the_least():
    step = of(gpt2(layers=6, **SIZES))
    roomy = search(step, None, mesh(), candidates=2)
    with pytest.raises(NothingFitsError, match=r"The least needs .*MiB, \d[^-]* too much"):
        search(step, None, mesh(), candidates=2, memory=roomy.cost.memory * 85 // 100)
