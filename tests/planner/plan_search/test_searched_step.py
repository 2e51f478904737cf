"""Equal layers are followed once: as much work for many as for few, and the same answer."""

from __future__ import annotations

import functools

import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.planning_models import Family, llama, mlp
from isoshard.core.traced.jax_steps import traced_jax_step
from isoshard.core.traced.traced_step import TracedStep
from isoshard.planner.machine.topologies import topology
from isoshard.planner.plan_search.named_dimensions import named_dimensions
from isoshard.planner.plan_search.plan_cost import cost_of
from isoshard.planner.plan_search.searched_step import SearchedStep, searched

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


def test_groups_are_those_of_the_step_as_written():
    step = followed(4)
    assert step.looped is not step.written
    sizes = [equations(one.program.jaxpr) for one in (step.looped, step.written)]
    assert sizes[0] < sizes[1]
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
    step = followed(4)
    names = {f"layers.{n}.self_attn.q_proj" for n in range(4)}
    assert names <= set(step.modules)
    assert len({step.modules[name] for name in names}) < 4
    assert set(step.modules.values()) <= set(step.program.modules)
    assert all(f"layers.{n}" in step.modules for n in range(4))


def test_a_chain_that_may_alternate_is_followed_as_it_is_written():
    step = searched(of(mlp(layers=8, width=512, batch=512)))
    assert step.looped is step.written
    first, second = next(
        group.dimensions
        for group in step.program.dimensions.groups
        if group.names[0] == "layers.0.weight"
    )
    assert first != second


def test_collectives_and_memory_with_loops_are_near_those_written_out():
    step = followed(4)
    layouts = {
        one.name: NamedSharding(mesh(), P("data") if one.role == "input" else P())
        for one in step.written.inputs
        if one.role in ("parameter", "input")
    }
    outputs = {n: NamedSharding(mesh(), P("data")) for n in step.modules}
    looped = step.cost(layouts, mesh(), 10**10, outputs)
    written = cost_of(step.written, layouts, mesh(), 10**10, outputs=outputs)
    assert looped.collectives == pytest.approx(dict(written.collectives), rel=0.05)
    assert looped.memory == pytest.approx(written.memory, rel=0.2)
    assert step.as_written(looped, layouts, mesh(), outputs).memory >= written.memory
