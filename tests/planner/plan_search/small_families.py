"""The families of `benchmarks.planning_models`, small enough for a test."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from benchmarks import planning_models as models
from benchmarks.planning_models import Family
from isoshard.core.traced.jax_steps import traced_jax_step
from isoshard.core.traced.traced_step import TracedStep
from isoshard.planner.machine.topologies import topology
from isoshard.planner.plan_search.condensed_program import CondensedProgram, condensed
from isoshard.planner.plan_search.named_dimensions import named_dimensions

_DECODER = {"width": 512, "heads": 8, "batch": 64, "length": 128}
_GROUPED = _DECODER | {"inner": 1536, "kv_heads": 4, "vocabulary": 4096}

SMALL: Mapping[str, Callable[[], Family]] = {
    "MLP": lambda: models.mlp(layers=4, width=1024, batch=2048),
    "Llama": lambda: models.llama(layers=2, **_GROUPED),
    "Mixtral": lambda: models.mixtral(layers=2, **_GROUPED),
}


@functools.cache
def traced(name: str) -> TracedStep:
    """A family's step; its layouts do not count."""
    family = SMALL[name]()
    mesh = topology("v5e:2x4").mesh((8,), ("data",))
    return traced_jax_step(family.step, family.args, {}, mesh, name=name)


@functools.cache
def program(name: str) -> CondensedProgram:
    """The same by kinds."""
    return condensed(traced(name), named_dimensions(traced(name)))
