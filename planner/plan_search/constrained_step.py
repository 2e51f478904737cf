"""Sharding constraints on the outputs of a traced step's modules, as a plan's activations set them.

The primitive `name` marks a module's output in the program, as `module:layers.0.mlp`, and its
gradient, where the program marks it, as `gradient:layers.0,layers.0.mlp` for all modules with this
output. A sharding constraint follows each mark, in loops and calls too; nothing is traced again.

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
"""Primitives with the sharding of operands of the same shape, next to elementwise ones."""


def constrained(program: Any, layouts: Mapping[str, NamedSharding]) -> Any:
    """The program with sharding constraints on the outputs of modules."""
    return _Constraints(layouts).program(program) if layouts else program


def module_of(equation: Any, mark: str = MODULE) -> str | None:
    """The module whose output an equation marks; None without a mark.

    Args:
        equation: of a jaxpr.
        mark: the prefix of the mark's name; `GRADIENT` for gradients.
    """
    name = equation.params.get("name") if equation.primitive.name == "name" else None
    return name.removeprefix(mark) if isinstance(name, str) and name.startswith(mark) else None


def with_free_results(step: TracedStep) -> TracedStep:
    """A step without the constraints that repeat the shardings of updated inputs and gradients.

    A bridge constrains updated arrays to the sharding they had, and gradients to that of their
    parameters. With other shardings of its inputs the step's results must follow the new ones.
    """
    jaxpr = opened(step.program)
    new = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    free: dict[Any, Any] = {}
    for result, var in zip(step.results, jaxpr.outvars, strict=True):
        if result.replaces is None:
            continue
        before = step.inputs[result.replaces].sharding
        for constraint in _updating(var, new):
            if constraint.params["sharding"].is_equivalent_to(
                before, constraint.outvars[0].aval.ndim
            ):
                free[constraint.outvars[0]] = constraint.invars[0]
    if not free:
        return step

    def source(var: Any) -> Any:
        while not isinstance(var, Literal) and var in free:  # an average that starts as the weight
            var = free[var]
        return var

    equations = [
        eqn.replace(invars=[source(var) for var in eqn.invars])
        for eqn in jaxpr.eqns
        if not any(var in free for var in eqn.outvars)
    ]
    outvars = [source(var) for var in jaxpr.outvars]
    program = replaced(step.program, eqns=equations, outvars=outvars)
    return dataclasses.replace(step, program=program)


def _updating(result: Any, new: Mapping[Any, Any]) -> Iterator[Any]:
    """The constraints between an updated array and its gradient, through elementwise eqns."""
    shape, visited, stack = result.aval.shape, set[Any](), [result]
    while stack:
        var = stack.pop()
        eqn = None if isinstance(var, Literal) or var in visited else new.get(var)
        aval: Any = var.aval
        if eqn is None or aval.shape != shape:
            continue
        visited.add(var)
        if eqn.primitive.name == "sharding_constraint":
            yield eqn
        if eqn.primitive.name in _PASSED or is_elementwise(eqn.primitive.name):
            stack += eqn.invars


class _Constraints(JaxprRewriter):
    def __init__(self, layouts: Mapping[str, NamedSharding]) -> None:
        super().__init__()
        self._layouts = layouts

    def equation(self, eqn: Any, context: Any) -> Iterator[Any]:
        modules = module_of(eqn) or module_of(eqn, GRADIENT) or ""
        layouts = (self._layouts.get(module) for module in modules.split(","))
        layout = next((layout for layout in layouts if layout is not None), None)
        if layout is not None and eqn.outvars[0].aval.ndim >= len(layout.spec):
            yield from _with_constraint(eqn, layout)
        else:
            yield self.inside(eqn, context)


def _with_constraint(equation: Any, layout: NamedSharding) -> Iterator[Any]:
    """An equation, and a sharding constraint of its result."""
    (result,) = equation.outvars
    struct = jax.ShapeDtypeStruct(result.aval.shape, result.aval.dtype)
    small = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, layout))(struct)
    small = opened(small)
    (constraint,) = small.eqns
    yield equation.replace(outvars=[small.invars[0]])
    yield constraint.replace(outvars=[result], source_info=equation.source_info)
