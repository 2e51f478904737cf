"""A traced step with the layouts of its modules' outputs fixed, as a plan's activations fix them.

A module's output is marked in the program by the primitive `name`, with `module:layers.0.mlp`, and
its gradient, where the program marks it, with `gradient:layers.0,layers.0.mlp` for all modules that
gave it. Behind both a layout constraint is put, in loops and calls too; nothing is traced again.

>>> import jax, jax.numpy as jnp
>>> from jax.ad_checkpoint import checkpoint_name
>>> from isoshard.planner.machine.topologies import topology
>>> mesh = topology("v5e:2x4").mesh((8,), ("data",))
>>> layout = NamedSharding(mesh, jax.P("data"))
>>> program = jax.make_jaxpr(lambda x: checkpoint_name(x, "module:head") + 1)(jnp.ones(8))
>>> [one.primitive.name for one in constrained(program, {"head": layout}).eqns]
['name', 'sharding_constraint', 'add']
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from isoshard.core.kit import (
    GRADIENT,
    MODULE,
    JaxprRewriter,
    Literal,
    TracedStep,
    is_elementwise,
    opened,
    replaced,
)

_PASSED = frozenset(("sharding_constraint", "jit", "convert_element_type", "optimization_barrier"))
"""What lies as its operands of the same shape, beside operations element by element."""


def constrained(program: Any, layouts: Mapping[str, NamedSharding]) -> Any:
    """The same program with constraints behind outputs of modules."""
    return _Constraints(layouts).program(program) if layouts else program


def module_of(equation: Any, mark: str = MODULE) -> str | None:
    """The module whose output an equation marks; None: it marks none.

    Args:
        equation: of a jaxpr.
        mark: what names of the marks begin with; `GRADIENT` for those of gradients.
    """
    name = equation.params.get("name") if equation.primitive.name == "name" else None
    return name.removeprefix(mark) if isinstance(name, str) and name.startswith(mark) else None


def with_free_results(step: TracedStep) -> TracedStep:
    """A step without the constraints that say again how what is updated, or its gradient, lies.

    A bridge lays out what it stores as it lay before, and gradients as their parameters. Under
    other layouts of its inputs the step is to give results that lie like these.
    """
    jaxpr = opened(step.program)
    new = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    free: dict[Any, Any] = {}
    for result, var in zip(step.results, jaxpr.outvars, strict=True):
        if result.replaces is None:
            continue
        before = step.inputs[result.replaces].sharding
        for one in _updating(var, new):
            if one.params["sharding"].is_equivalent_to(before, one.outvars[0].aval.ndim):
                free[one.outvars[0]] = one.invars[0]
    if not free:
        return step

    def of(var: Any) -> Any:
        while not isinstance(var, Literal) and var in free:  # an average that starts as the weight
            var = free[var]
        return var

    equations = [
        eqn.replace(invars=[of(var) for var in eqn.invars])
        for eqn in jaxpr.eqns
        if not any(var in free for var in eqn.outvars)
    ]
    outvars = [of(var) for var in jaxpr.outvars]
    program = replaced(step.program, eqns=equations, outvars=outvars)
    return dataclasses.replace(step, program=program)


def _updating(result: Any, new: Mapping[Any, Any]) -> Iterator[Any]:
    """The constraints on the way to what is updated, element by element, from its gradient."""
    shape, visited, stack = result.aval.shape, set[Any](), [result]
    while stack:
        var = stack.pop()
        one = None if isinstance(var, Literal) or var in visited else new.get(var)
        aval: Any = var.aval
        if one is None or aval.shape != shape:
            continue
        visited.add(var)
        if one.primitive.name == "sharding_constraint":
            yield one
        if one.primitive.name in _PASSED or is_elementwise(one.primitive.name):
            stack += one.invars


class _Constraints(JaxprRewriter):
    def __init__(self, layouts: Mapping[str, NamedSharding]) -> None:
        super().__init__()
        self._layouts = layouts

    def equation(self, eqn: Any, context: Any) -> Iterator[Any]:
        modules = module_of(eqn) or module_of(eqn, GRADIENT) or ""
        layouts = (self._layouts.get(module) for module in modules.split(","))
        layout = next((layout for layout in layouts if layout is not None), None)
        if layout is not None and eqn.outvars[0].aval.ndim >= len(layout.spec):
            yield from _behind(eqn, layout)
        else:
            yield self.inside(eqn, context)


def _behind(equation: Any, layout: NamedSharding) -> Iterator[Any]:
    """An equation, and a constraint that takes its result's place."""
    (result,) = equation.outvars
    struct = jax.ShapeDtypeStruct(result.aval.shape, result.aval.dtype)
    small = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, layout))(struct)
    small = opened(small)
    (constraint,) = small.eqns
    yield equation.replace(outvars=[small.invars[0]])
    yield constraint.replace(outvars=[result], source_info=equation.source_info)
