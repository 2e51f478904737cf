"""How the values of a step lie as it is written: what loops over its layers must not change.

>>> import jax
>>> import numpy as np
>>> from jax.sharding import NamedSharding, PartitionSpec as P
>>> from isoshard.core.planner.machine.topologies import topology
>>> from isoshard.core.planner.traced.traced_step import StepInput, StepResult
>>> mesh = topology("v5e:2x2").mesh((4,), ("data",))
>>> program = jax.make_jaxpr(lambda x, w: x @ w)(np.ones((8, 4)), np.ones((4, 2)))
>>> inputs = tuple(
...     StepInput(name, "input", shape, np.dtype("float32"), NamedSharding(mesh, spec))
...     for name, shape, spec in (("x", (8, 4), P("data")), ("w", (4, 2), P()))
... )
>>> step = TracedStep("product", "jax", program, inputs, (StepResult("y"),), mesh)
>>> found = border_layouts(step, program)
>>> found[program.jaxpr.outvars[0]].spec
P('data', UNCONSTRAINED)
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from ..traced.rolled_step import rolled_step
from ..traced.traced_step import TracedStep
from .common_expressions import CONSTANT
from .factor_layouts import Split
from .flat_program import flattened
from .spreading import ArrayLayouts
from .trace_depth import laid_values


def for_compilers(step: TracedStep) -> TracedStep:
    """The same step with equal layers as loops that lie as the layers written out.

    `by_tracing` spreads layouts through loops as through layers. XLA's partitioner does not always:
    what loops carry and keep is constrained for it.

    Args:
        step: as traced, with the layouts of its inputs.

    Returns:
        A new step; the one given if nothing in it repeats.
    """
    return rolled_step(step, layouts=functools.partial(border_layouts, step))


def border_layouts(step: TracedStep, program: Any) -> dict[Any, NamedSharding]:
    """Layouts of the variables of a step's program, as they spread from its inputs.

    Args:
        step: with the layouts of its inputs.
        program: the step's, or an equal one that was written otherwise: a closed jaxpr.

    Returns:
        Of each variable that some mesh axis splits its layout. Axes that nothing splits are left to
        the partitioner, and so are those that a part of a mesh axis splits.
    """
    layouts = ArrayLayouts(dict(step.mesh.shape))
    flat = flattened(program)
    laid, _ = laid_values(dataclasses.replace(step, program=program), flat, layouts)
    found = {}
    for variable, value in flat.variables.items():
        if value == CONSTANT:
            continue
        entries = [_names(layouts, split) for split in laid[value]]
        if any(entries):
            free = PartitionSpec.UNCONSTRAINED
            spec = PartitionSpec(*[one or free for one in entries])
            found[variable] = NamedSharding(step.mesh, spec)
    return found


def _names(layouts: ArrayLayouts, split: Split) -> tuple[str, ...]:
    """The mesh axes that split one axis; none if one of them does so only in part."""
    names = tuple(dict.fromkeys([layouts.axes((one,))[0] for one in split]))
    whole = tuple([part for name in names for part in layouts.parts(name)])
    return names if whole == split else ()
