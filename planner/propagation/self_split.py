"""Operators of `custom_partitioning`, partitioned before the export by their callbacks.

XLA's partitioner calls the Python callback of such an operator. A planned program is compiled in
another process, which has no callbacks. So they are called before the export, with the shardings
that propagate to the operators from the step's inputs. If the result of one has collectives, as a
ring of attention has, all operators are replaced by their results, each in a `jax.shard_map`. XLA
calls them after propagation, so the shardings that a result needs must not propagate: its operands
and results are constrained to the shardings of the call. Otherwise XLA partitions the operators'
functions on global arrays, to the same end.

>>> import numpy as np
>>> from jax.sharding import PartitionSpec as P
>>> from isoshard.core.layout.custom_partitioning import partitioned
>>> from isoshard.planner.machine.topologies import topology
>>> from isoshard.core.traced.traced_step import StepInput, StepResult
>>> mesh = topology("v5e:2x2").mesh((4,), ("x",))
>>> def split(_static, mesh, operands, results):
...     layout = operands[0].sharding
...     return mesh, lambda x: jax.lax.ppermute(x, "x", [(0, 1)]), layout, (layout,)
>>> shift = partitioned(lambda _, x: x, split, lambda _, shapes: ("i -> i", {}))
>>> program = jax.make_jaxpr(lambda x: shift(0, x))(np.ones(8, np.float32))
>>> layout = NamedSharding(mesh, P("x"))
>>> step = TracedStep("shift", "jax", program, (StepInput("x", "input", (8,), np.dtype("float32"),
...                   layout),), (StepResult("y"),), mesh)
>>> "ppermute" in str(program), "ppermute" in str(with_custom_partitions(step))
(False, True)
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from isoshard.core.kit import (
    ClosedJaxpr,
    JaxprRewriter,
    TracedStep,
    Var,
    auto,
    closed_call_p,
    equations,
    inlined,
    jaxprs_inside,
)

from .boundary_shardings import boundary_shardings

CUSTOM_PARTITIONING = "custom_partitioning"
"""The primitive of the operators."""

_TALK = frozenset("ppermute psum psum_invariant all_gather all_to_all reduce_scatter".split())
_SPECIFIC = _TALK | {"pallas_call", "scan", "while"}
"""What only the program of each device has: collectives, kernels, and loops over tiles."""


def with_custom_partitions(step: TracedStep) -> ClosedJaxpr:
    """A step's program with its operators partitioned, if one has collectives or kernels then.

    Returns:
        A program of the same inputs and results; the step's own if it has no such operators.
    """
    if not _has_custom_partitioning(step.program):
        return step.program
    step = dataclasses.replace(step, mesh=auto(step.mesh))  # an operator is never in a typed part
    program = inlined(step.program, holding=CUSTOM_PARTITIONING)
    sharding = boundary_shardings(step, program, declared=True)
    specific = list[Any]()
    new = _CustomPartitions(step, sharding, specific).program(program)
    return new if specific else program


def _has_custom_partitioning(program: Any) -> bool:
    return any(equation.primitive.name == CUSTOM_PARTITIONING for equation in equations(program))


def _partitioned(
    step: TracedStep,
    sharding: dict[Any, NamedSharding],
    equation: Any,
    fixed: dict[Any, Any],
    specific: list[Any],
) -> list[Any]:
    """The equations that replace an operator; if they have any of `_SPECIFIC`, `specific` gets it.

    An array that several operators read is constrained once: `fixed` has it by variable.
    """
    params = equation.params
    count = params["in_tree"].num_leaves
    if len(equation.invars) != count:  # it has closed over something
        return [equation]
    operand_structs, result_structs = (
        [_sharded_struct(variable, sharding, step) for variable in variables]
        for variables in (equation.invars, equation.outvars)
    )
    arguments = params["in_tree"].unflatten(operand_structs)
    requested = (step.mesh, arguments, params["out_tree"].unflatten(result_structs))
    # As XLA calls it: in a thread without our context (mesh, x64).
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        future = thread.submit(params["partition"], *params["static_args"], *requested)
        mesh, local, out, need = future.result()
    if mesh is not step.mesh:
        return [equation]
    shard_map = jax.shard_map(
        local, mesh=mesh, in_specs=_specs(need), out_specs=_specs(out), check_vma=False
    )

    def per_device(*operands: Any) -> Any:
        return _constrained(requested[2], shard_map(*operands))

    with jax.enable_x64(step.wide):
        body = jax.make_jaxpr(per_device)(*arguments)
    if any(equation.primitive.name in _SPECIFIC for equation in equations(body)):
        specific.append(equation)
    before = list[Any]()
    for variable, shape in zip(equation.invars, operand_structs, strict=True):
        if not hasattr(variable, "val") and variable not in fixed:
            (constraint,) = jax.make_jaxpr(lambda x, to=shape: _constrained(to, x))(shape).eqns
            fixed[variable] = Var(variable.aval)
            before.append(constraint.replace(invars=[variable], outvars=[fixed[variable]]))
    operands = [var if hasattr(var, "val") else fixed[var] for var in equation.invars]
    call = {"call_jaxpr": body}
    return [*before, equation.replace(primitive=closed_call_p, params=call, invars=operands)]


def _sharded_struct(
    variable: Any, sharding: dict[Any, NamedSharding], step: TracedStep
) -> jax.ShapeDtypeStruct:
    """An operand or a result with the sharding that propagated to it."""
    aval = variable.aval
    spec = PartitionSpec()
    if not hasattr(variable, "val") and variable in sharding:
        free = PartitionSpec.UNCONSTRAINED
        spec = PartitionSpec(*[None if axis is free else axis for axis in sharding[variable].spec])
    layout = NamedSharding(step.mesh, spec)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=layout)


def _constrained(shapes: Any, values: Any) -> Any:
    """Values constrained to the shardings of `shapes`."""
    return jax.tree.map(
        lambda like, x: jax.lax.with_sharding_constraint(x, like.sharding), shapes, values
    )


def _specs(layouts: Any) -> Any:
    return jax.tree.map(lambda layout: layout.spec, layouts)


class _CustomPartitions(JaxprRewriter):
    """Replaces operators of `custom_partitioning` by their partitioned programs, at any depth."""

    def __init__(
        self, step: TracedStep, sharding: dict[Any, NamedSharding], specific: list[Any]
    ) -> None:
        super().__init__()
        self._step, self._sharding, self._specific = step, sharding, specific
        self._fixed = dict[Any, Any]()

    def equation(self, eqn: Any, context: Any) -> Iterable[Any]:
        if eqn.primitive.name == CUSTOM_PARTITIONING:
            return _partitioned(self._step, self._sharding, eqn, self._fixed, self._specific)
        if any(_has_custom_partitioning(nested) for nested in jaxprs_inside(eqn.params)):
            return [self.inside(eqn, context)]
        return [eqn]
