"""How the values of a step lie as it is written: what loops over its layers must not change.

>>> import jax
>>> import numpy as np
>>> from jax.sharding import NamedSharding, PartitionSpec as P
>>> from isoshard.planner.machine.topologies import topology
>>> from isoshard.core.traced.traced_step import StepInput, StepResult
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

import functools
from collections.abc import Sequence

from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from isoshard.core.runtime._jax_internals.jaxpr_classes import ClosedJaxpr, Var
from isoshard.core.traced.traced_step import TracedStep

from ..traced.rolled_step import rolled_step
from .common_expressions import CONSTANT
from .factor_layouts import Split
from .flat_program import flattened
from .spreading import ArrayLayouts, spread


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


def border_layouts(
    step: TracedStep, program: ClosedJaxpr, *, said: bool = False
) -> dict[Var, NamedSharding]:
    """Layouts of the variables of a step's program, as they spread from its inputs.

    Args:
        step: with the layouts of its inputs.
        program: the step's, or an equal one that was written otherwise.
        said: as for `flattened`.

    Returns:
        As of `spread_layouts`.
    """
    inputs = [one.sharding for one in step.inputs]
    results = [one.sharding for one in step.results]
    return spread_layouts(program, step.mesh, inputs, results, said=said)


def spread_layouts(
    program: ClosedJaxpr,
    mesh: Mesh | AbstractMesh,
    inputs: Sequence[NamedSharding | None],
    results: Sequence[NamedSharding | None] = (),
    *,
    said: bool = False,
) -> dict[Var, NamedSharding]:
    """Layouts of the variables of a program, as they spread from its inputs.

    Args:
        program: traced; layout constraints in it name `mesh`.
        mesh: of all layouts.
        inputs: how each lies; None is not known.
        results: how each is to lie; None leaves one open, and so do those that are not said.
        said: as for `flattened`.

    Returns:
        Of each variable that some mesh axis splits its layout. Axes that nothing splits are left to
        the partitioner, and so are those that a part of a mesh axis splits. Explicit mesh axes are
        passed by: how they split a variable is part of its type.
    """
    layouts = ArrayLayouts(dict(mesh.shape))
    flat = flattened(program, said=said)
    given = {
        value: layouts.of_spec(one.spec, len(flat.shapes[value]))
        for value, one in zip(flat.inputs, inputs, strict=True)
        if one is not None
    }
    laid = spread(flat, layouts, given, results)
    free = PartitionSpec.UNCONSTRAINED
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    found = {}
    for variable, value in flat.variables.items():
        if value == CONSTANT:
            continue
        split_by = [_names(layouts, split) for split in laid[value]]
        entries = [[name for name in names if kinds[name] == AxisType.Auto] for names in split_by]
        if any(entries):
            spec = PartitionSpec(*[tuple(one) or free for one in entries])
            found[variable] = NamedSharding(mesh, spec)
    return found


def _names(layouts: ArrayLayouts, split: Split) -> tuple[str, ...]:
    """The mesh axes that split one axis; none if one of them does so only in part."""
    names = tuple(dict.fromkeys([layouts.axes((one,))[0] for one in split]))
    whole = tuple([part for name in names for part in layouts.parts(name)])
    return names if whole == split else ()
