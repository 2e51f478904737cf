"""Operators that split themselves, as the program of one device that they answer with.

Operators of `custom_partitioning` say how they are split when XLA's partitioner asks them. A
planned program is compiled in another process, which cannot ask. So they are asked before it is
exported, with the layouts that spread to them from the step's inputs, by the rules that they say.
Where devices talk in what one of them answers, as in a ring of attention, all answers take their
operators' place, each in a `jax.shard_map`. As XLA asks when layouts have spread, what an answer
needs does not spread: its operands and results are constrained to the layouts that it was asked
with. Else XLA splits the operations on whole arrays that they stand for, to the same end.

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
>>> "ppermute" in str(program), "ppermute" in str(answered(step))
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
from isoshard.planner.propagation.boundary_shardings import boundary_shardings

ASKED = "custom_partitioning"
"""The primitive of operators that are asked."""

_TALK = frozenset("ppermute psum psum_invariant all_gather all_to_all reduce_scatter".split())


def answered(step: TracedStep) -> ClosedJaxpr:
    """A step's program in which operators are what they answer, if devices talk in one.

    Returns:
        A program of the same inputs and results; the step's own if nothing in it is to be asked.
    """
    if not _asks(step.program):
        return step.program
    step = dataclasses.replace(step, mesh=auto(step.mesh))  # an operator is never in a typed part
    program = inlined(step.program, holding=ASKED)
    sharding = boundary_shardings(step, program, declared=True)
    talking = list[Any]()
    new = _Answered(step, sharding, talking).program(program)
    return new if talking else program


def _asks(program: Any) -> bool:
    return any(equation.primitive.name == ASKED for equation in equations(program))


def _answer(
    step: TracedStep,
    sharding: dict[Any, NamedSharding],
    equation: Any,
    fixed: dict[Any, Any],
    talking: list[Any],
) -> list[Any]:
    """What takes the place of an operator; it is noted if devices talk in it.

    What several operators read is laid out once for all: `fixed` has it by variable.
    """
    params = equation.params
    count = params["in_tree"].num_leaves
    if len(equation.invars) != count:  # it has closed over something
        return [equation]
    given, target = (
        [_laid(variable, sharding, step) for variable in some]
        for some in (equation.invars, equation.outvars)
    )
    arguments = params["in_tree"].unflatten(given)
    requested = (step.mesh, arguments, params["out_tree"].unflatten(target))
    # As XLA asks: in a thread of its own, where nothing is set.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        answer = thread.submit(params["partition"], *params["static_args"], *requested)
        mesh, local, out, need = answer.result()
    if mesh is not step.mesh:
        return [equation]
    shard_map = jax.shard_map(
        local, mesh=mesh, in_specs=_specs(need), out_specs=_specs(out), check_vma=False
    )

    def apart(*operands: Any) -> Any:
        return _laid_as(requested[2], shard_map(*operands))

    with jax.enable_x64(step.wide):
        body = jax.make_jaxpr(apart)(*arguments)
    if any(equation.primitive.name in _TALK for equation in equations(body)):
        talking.append(equation)
    before = list[Any]()
    for variable, shape in zip(equation.invars, given, strict=True):
        if not hasattr(variable, "val") and variable not in fixed:
            (constraint,) = jax.make_jaxpr(lambda x, to=shape: _laid_as(to, x))(shape).eqns
            fixed[variable] = Var(variable.aval)
            before.append(constraint.replace(invars=[variable], outvars=[fixed[variable]]))
    operands = [var if hasattr(var, "val") else fixed[var] for var in equation.invars]
    call = {"call_jaxpr": body}
    return [*before, equation.replace(primitive=closed_call_p, params=call, invars=operands)]


def _laid(
    variable: Any, sharding: dict[Any, NamedSharding], step: TracedStep
) -> jax.ShapeDtypeStruct:
    """An operand or a result in the layout that spread to it; whole along all other axes."""
    aval = variable.aval
    spec = PartitionSpec()
    if not hasattr(variable, "val") and variable in sharding:
        free = PartitionSpec.UNCONSTRAINED
        spec = PartitionSpec(*[None if axis is free else axis for axis in sharding[variable].spec])
    layout = NamedSharding(step.mesh, spec)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=layout)


def _laid_as(shapes: Any, values: Any) -> Any:
    """Values in the layouts of shapes: what an answer needs does not spread beyond it."""
    return jax.tree.map(
        lambda like, x: jax.lax.with_sharding_constraint(x, like.sharding), shapes, values
    )


def _specs(layouts: Any) -> Any:
    return jax.tree.map(lambda one: one.spec, layouts)


class _Answered(JaxprRewriter):
    """Puts what operators of `custom_partitioning` answer in their place, at any depth."""

    def __init__(
        self, step: TracedStep, sharding: dict[Any, NamedSharding], talking: list[Any]
    ) -> None:
        super().__init__()
        self._step, self._laid, self._talking = step, sharding, talking
        self._fixed = dict[Any, Any]()

    def equation(self, eqn: Any, context: Any) -> Iterable[Any]:
        if eqn.primitive.name == ASKED:
            return _answer(self._step, self._laid, eqn, self._fixed, self._talking)
        if any(_asks(nested) for nested in jaxprs_inside(eqn.params)):
            return [self.inside(eqn, context)]
        return [eqn]
