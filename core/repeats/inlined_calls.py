"""A program with its small `jit` calls written out, as a compiler writes them out.

What is inside of a call is then seen: of `jnp.where(mask, x, 0.0)` the zeros are a constant, which
no loop has to keep for the next.

>>> import jax, jax.numpy as jnp
>>> program = jax.make_jaxpr(lambda x: jnp.where(x > 0, x, 0.0))(jnp.ones(4))
>>> [one.primitive.name for one in program.eqns]
['gt', 'jit']
>>> [one.primitive.name for one in inlined(program).eqns]
['gt', 'convert_element_type', 'broadcast_in_dim', 'select_n']
"""

from __future__ import annotations

from typing import Any

from jax.sharding import Sharding

from isoshard.core.runtime._jax_internals.jaxpr_classes import ClosedJaxpr, Literal, Var
from isoshard.core.runtime.jaxprs import CALLS, jaxprs_inside, opened, replaced
from isoshard.core.runtime.jaxprs import equations as all_equations

_WRITTEN_OUT = ("jit", "closed_call", "eval_jaxpr", "custom_vjp_call", "split_operator")
_BODY = {name: CALLS[name] for name in _WRITTEN_OUT}
"""Primitive that calls one program with its operands -> the parameter that has it."""


def inlined(program: ClosedJaxpr, holding: str = "") -> ClosedJaxpr:
    """Write out calls of `jit` that hold no program of their own, and say nothing of layouts.

    Args:
        program: any closed jaxpr; loops, branches, derivatives and calls with these in them stay as
            they are.
        holding: the name of a primitive: instead of these, all calls are written out that hold one
            at any depth, also where a function has a gradient of its own.

    Returns:
        The same program; the one given if there are no such calls.
    """

    def wanted(equation: Any) -> bool:
        return _holds(equation, holding) if holding else _is_call(equation)

    if not any(wanted(one) for one in opened(program).eqns):
        return program
    names: dict[Any, Any] = {}
    equations: list[Any] = []
    for one in opened(program).eqns:
        operands = [_read(atom, names) for atom in one.invars]
        if not wanted(one):
            equations.append(one.replace(invars=operands))
            continue
        inner = opened(one.params[_BODY[one.primitive.name]])
        inside = dict(zip(inner.invars, operands, strict=True))
        for each in inner.eqns:  # one program may be called often: each call has its own results
            made = [Var(variable.aval) for variable in each.outvars]
            read = [_read(atom, inside) for atom in each.invars]
            equations.append(each.replace(invars=read, outvars=made))
            inside.update(zip(each.outvars, made, strict=True))
        names.update(zip(one.outvars, [_read(atom, inside) for atom in inner.outvars], strict=True))
    results = [_read(one, names) for one in opened(program).outvars]
    found = replaced(program, eqns=equations, outvars=results)
    return inlined(found, holding) if holding else found


def _read(atom: Any, names: dict[Any, Any]) -> Any:
    return atom if isinstance(atom, Literal) else names.get(atom, atom)


def _holds(equation: Any, name: str) -> bool:
    """Whether a call that can be written out has a primitive in it."""
    body = equation.params.get(_BODY.get(equation.primitive.name, ""))
    if body is None or body.consts:
        return False
    return any(one.primitive.name == name for one in all_equations(body))


def _is_call(equation: Any) -> bool:
    params = equation.params
    if equation.primitive.name != "jit" or params["jaxpr"].consts or equation.effects:
        return False
    if any(any(jaxprs_inside(one.params)) for one in params["jaxpr"].eqns):
        return False
    layouts = (*params["in_shardings"], *params["out_shardings"])
    return not any(isinstance(one, Sharding) for one in layouts) and not any(
        params["donated_invars"]
    )
