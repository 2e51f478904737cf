"""Operators that split themselves, as the program of one device that they answer with.

Operators of `custom_partitioning` say how they are split when XLA's partitioner asks them. A
planned program is compiled in another process, which cannot ask. So they are asked before it is
exported, with the layouts that spread to them from the step's inputs. Where devices talk in what
they answer, as in a ring of attention, the answer takes the operator's place, in a `jax.shard_map`.
Else XLA splits the operation on whole arrays that the operator stands for, to the same end.

>>> import numpy as np
>>> from jax.sharding import PartitionSpec as P
>>> from isoshard.core.layout.custom_partitioning import partitioned
>>> from isoshard.core.planner.machine.topologies import topology
>>> from isoshard.core.planner.traced.traced_step import StepInput, StepResult
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
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxprs_in_params
from jax.extend.core.primitives import closed_call_p
from jax.sharding import NamedSharding, PartitionSpec

from isoshard.core.layout.axis_types import auto
from isoshard.core.planner.axes.border_layouts import border_layouts
from isoshard.core.planner.traced.traced_step import TracedStep
from isoshard.core.repeats.inlined_calls import inlined
from isoshard.core.runtime.jaxprs import equations

ASKED = "custom_partitioning"
"""The primitive of operators that are asked."""

_TALK = frozenset("ppermute psum psum_invariant all_gather all_to_all reduce_scatter".split())


def answered(step: TracedStep) -> ClosedJaxpr:
    """A step's program in which operators that talk are what they answer.

    Args:
        step: with the layouts of its inputs.

    Returns:
        A program of the same inputs and results; the step's own if nothing in it is to be asked.
    """
    if not _asks(step.program):
        return step.program
    step = dataclasses.replace(step, mesh=auto(step.mesh))  # an operator is never in a typed part
    program = inlined(step.program, holding=ASKED)
    laid = border_layouts(step, program)
    return _mapped(program, lambda equation: _answer(step, laid, equation))


def _asks(program: Any) -> bool:
    return any(one.primitive.name == ASKED for one in equations(program))


def _answer(step: TracedStep, laid: dict[Any, NamedSharding], equation: Any) -> Any:
    params = equation.params
    count = params["in_tree"].num_leaves
    if len(equation.invars) != count:  # it has closed over something
        return equation
    given, wanted = (
        [_laid(variable, laid, step) for variable in some]
        for some in (equation.invars, equation.outvars)
    )
    arguments = params["in_tree"].unflatten(given)
    asked = (step.mesh, arguments, params["out_tree"].unflatten(wanted))
    # As XLA asks: in a thread of its own, where nothing is set.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        answer = thread.submit(params["partition"], *params["static_args"], *asked)
        mesh, local, out, need = answer.result()
    if mesh is not step.mesh:
        return equation
    whole = jax.shard_map(
        local, mesh=mesh, in_specs=_specs(need), out_specs=_specs(out), check_vma=False
    )
    with jax.enable_x64(step.wide):
        body = jax.make_jaxpr(whole)(*arguments)
    if all(one.primitive.name not in _TALK for one in equations(body)):
        return equation
    return equation.replace(primitive=closed_call_p, params={"call_jaxpr": body})


def _laid(variable: Any, laid: dict[Any, NamedSharding], step: TracedStep) -> jax.ShapeDtypeStruct:
    """An operand or a result in the layout that spread to it; whole along all other axes."""
    aval = variable.aval
    spec = PartitionSpec()
    if not hasattr(variable, "val") and variable in laid:
        free = PartitionSpec.UNCONSTRAINED
        spec = PartitionSpec(*[None if one is free else one for one in laid[variable].spec])
    layout = NamedSharding(step.mesh, spec)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=layout)


def _specs(layouts: Any) -> Any:
    return jax.tree.map(lambda one: one.spec, layouts)


def _mapped(program: Any, change: Callable[[Any], Any]) -> Any:
    """A jaxpr with operators of `custom_partitioning` changed, at any depth."""
    if isinstance(program, ClosedJaxpr):
        return program.replace(jaxpr=_mapped(program.jaxpr, change))
    if isinstance(program, Jaxpr):
        return program.replace(eqns=[_changed(one, change) for one in program.eqns])
    if type(program) in (tuple, list):
        return type(program)(_mapped(one, change) for one in program)
    return program


def _changed(equation: Any, change: Callable[[Any], Any]) -> Any:
    if equation.primitive.name == ASKED:
        return change(equation)
    if not any(_asks(inside) for inside in jaxprs_in_params(equation.params)):
        return equation
    params = {name: _mapped(value, change) for name, value in equation.params.items()}
    return equation.replace(params=params)
