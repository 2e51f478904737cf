"""Shardings of a step as it is written, which loops over its layers must not change.

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
>>> shardings = boundary_shardings(step, program)
>>> shardings[program.jaxpr.outvars[0]].spec
P('data', UNCONSTRAINED)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from isoshard.core.kit import ClosedJaxpr, TracedStep, Var

from ..traced.rolled_step import rolled_step
from .factors import Split
from .flat_program import CONSTANT, flattened
from .sharding_propagation import ArrayShardings, propagate


def for_compilers(step: TracedStep) -> TracedStep:
    """The same step with equal layers as loops, sharded like the layers written out.

    `by_tracing` spreads layouts through loops as through layers. XLA's partitioner does not always:
    what loops carry and keep is constrained for it.

    Returns:
        A new step; `step` itself if nothing in it repeats.
    """
    return rolled_step(step, layouts=functools.partial(boundary_shardings, step))


def boundary_shardings(
    step: TracedStep, program: ClosedJaxpr, *, declared: bool = False
) -> dict[Var, NamedSharding]:
    """Shardings of a step's variables, propagated from its inputs."""
    inputs = [leaf.sharding for leaf in step.inputs]
    results = [result.sharding for result in step.results]
    return propagated_shardings(program, step.mesh, inputs, results, declared=declared)


def propagated_shardings(
    program: ClosedJaxpr,
    mesh: Mesh | AbstractMesh,
    inputs: Sequence[NamedSharding | None],
    results: Sequence[NamedSharding | None] = (),
    *,
    declared: bool = False,
) -> dict[Var, NamedSharding]:
    """Shardings of a program's variables, propagated from its inputs.

    Args:
        program: traced; layout constraints in it name `mesh`.
        mesh: of all layouts.
        inputs: the sharding of each; None of those without one.
        results: the required sharding of each; None, or a shorter sequence, leaves it open.
        declared: as for `flattened`.

    Returns:
        The sharding of each variable that a mesh axis splits. Axes that nothing splits are left to
        the partitioner, and so are those that a sub-axis splits. Explicit mesh axes are skipped:
        how they split a variable is part of its type.
    """
    layouts = ArrayShardings(dict(mesh.shape))
    flat = flattened(program, declared=declared)
    input_layouts = {
        value: layouts.of_spec(leaf.spec, len(flat.shapes[value]))
        for value, leaf in zip(flat.inputs, inputs, strict=True)
        if leaf is not None
    }
    sharding = propagate(flat, layouts, input_layouts, results)
    free = PartitionSpec.UNCONSTRAINED
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    shardings = {}
    for variable, value in flat.variables.items():
        if value == CONSTANT:
            continue
        split_by = [_names(layouts, split) for split in sharding[value]]
        entries = [[name for name in names if kinds[name] == AxisType.Auto] for names in split_by]
        if any(entries):
            spec = PartitionSpec(*[tuple(entry) or free for entry in entries])
            shardings[variable] = NamedSharding(mesh, spec)
    return shardings


def _names(layouts: ArrayShardings, split: Split) -> tuple[str, ...]:
    """The mesh axes that split one axis; none if only a sub-axis of one of them does."""
    names = tuple(dict.fromkeys([layouts.axes((axis,))[0] for axis in split]))
    full = tuple([sub_axis for name in names for sub_axis in layouts.sub_axes(name)])
    return names if full == split else ()
