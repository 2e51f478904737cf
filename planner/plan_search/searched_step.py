"""A step as a search evaluates it: equal layers as a loop, so that 96 take no longer than 4.

The plan is for the step as written: shardings have the names of its parameters, and memory is
checked with its layers written out, since a loop may store fewer activations.

Where loops would hide a choice (in a chain of square layers every second one may have another
sharding), the step is evaluated as it is written.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jax.sharding import Mesh, NamedSharding

from isoshard.core.kit import TracedStep, equations
from isoshard.planner.machine.topologies import topology_of
from isoshard.planner.traced.rolled_step import rolled_step

from .condensed_program import CondensedProgram, condensed
from .constrained_step import module_of, with_free_results
from .named_dimensions import NamedDimensions, named_dimensions
from .plan_cost import PlanCost, SearchDepth, cost_of

_NUMBER = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True, eq=False)
class SearchedStep:
    """A step in two forms.

    Attributes:
        written: as it was traced.
        looped: with loops over equal layers; `written` itself if there are none.
        program: `looped` by kinds.
    """

    written: TracedStep
    looped: TracedStep
    program: CondensedProgram

    @functools.cached_property
    def modules(self) -> Mapping[str, str]:
        """The modules of the step as written, each with its representative in `program.modules`.

        In a loop the first layer, or in the backward the last, represents all.
        """
        looped_modules = self.program.modules
        same = {_NUMBER.sub("*", name): name for name in reversed(tuple(looped_modules))}
        modules = {}
        for name in dict.fromkeys(_marked(self.written.program)):
            representative = name if name in looped_modules else same.get(_NUMBER.sub("*", name))
            # The name "" is the model, whose output is that of its last module.
            if name and representative is not None:
                modules[name] = representative
        return modules

    def cost(
        self,
        layouts: Mapping[str, NamedSharding],
        mesh: Mesh,
        capacity: int,
        outputs: Mapping[str, NamedSharding] | None = None,
        depth: SearchDepth = "trace",
    ) -> PlanCost:
        """The cost of shardings, with loops."""
        if depth == "trace" or self.looped is self.written:
            return cost_of(self.looped, layouts, mesh, capacity, outputs=outputs, depth=depth)
        # The shardings of what loops carry follow those of inputs: each choice has its own loops.
        loops = not runs_as_written(mesh)
        return cost_of(
            self.written, layouts, mesh, capacity, outputs=outputs, depth=depth, loops=loops
        )

    def as_written(
        self,
        cost: PlanCost,
        layouts: Mapping[str, NamedSharding],
        mesh: Mesh,
        outputs: Mapping[str, NamedSharding] | None = None,
    ) -> PlanCost:
        """The cost with the memory of the step as written, too; where it runs so, its cost."""
        if self.looped is self.written:
            return cost
        result = cost_of(self.written, layouts, mesh, cost.capacity, outputs=outputs)
        if runs_as_written(mesh):
            return result
        return dataclasses.replace(cost, memory=max(cost.memory, result.memory))


def runs_as_written(mesh: Mesh) -> bool:
    """Whether seconds are those of layers written out: on virtual devices, where steps run so.

    Loops there copy rows of stacks, and nothing overlaps in them; their gradients stay in memory,
    which may be newly allocated, until the optimizer's loop.
    """
    return topology_of(mesh).chip.platform == "cpu"


def searched(step: TracedStep) -> SearchedStep:
    """Prepare a step for a search.

    Args:
        step: as traced; its shardings are not read.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from ..machine.topologies import topology
        >>> from isoshard.core.traced.jax_steps import traced_jax_step
        >>> def loss(layers, x):
        ...     for up, down in layers:
        ...         x = x + jnp.tanh(x @ up) @ down
        ...     return jnp.mean(x)
        >>> up, down = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 16), (16, 8)))
        >>> x = jax.ShapeDtypeStruct((4, 8), "float32")
        >>> mesh = topology("v5e:2x4").mesh((8,), ("data",))
        >>> step = traced_jax_step(loss, ([(up, down)] * 40, x), {}, mesh)
        >>> found = searched(step)
        >>> len(step.inputs), len(found.looped.inputs), len(found.program.dimensions.groups)
        (81, 5, 3)
    """
    step = with_free_results(step)
    looped = with_loops(step)
    dimensions = named_dimensions(looped)
    if looped is not step and _tied(dimensions):
        written = named_dimensions(step)
        if _tied(written) < _tied(dimensions):
            looped, dimensions = step, written
    return SearchedStep(step, looped, condensed(looped, dimensions))


def _tied(dimensions: NamedDimensions) -> int:
    """The number of parameters of which two axes are one dimension.

    Loops tie axes of different layers: of what they carry, and of parameters that an optimizer's
    loop updates in turn.
    """
    return sum(
        len(group.names)
        for group in dimensions.groups
        if group.role == "parameter"
        and _repeated([dimension for dimension in group.dimensions if dimension >= 0])
    )


def _repeated(some: list[int]) -> bool:
    return len(set(some)) < len(some)


def with_loops(step: TracedStep) -> TracedStep:
    """A step with its equal layers as loops; the step itself without equal layers."""
    looped = rolled_step(step)
    return looped if _loops(looped) > _loops(step) else step


def _loops(step: TracedStep) -> int:
    return sum(eqn.primitive.name == "scan" for eqn in step.program.eqns)


def _marked(jaxpr: Any) -> Iterator[str]:
    """The names of modules whose outputs a program marks, in order."""
    return filter(None, map(module_of, equations(jaxpr)))
