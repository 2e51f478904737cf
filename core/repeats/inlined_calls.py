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

from jax.extend.core import ClosedJaxpr, Literal, Var, jaxprs_in_params
from jax.sharding import Sharding


def inlined(program: ClosedJaxpr) -> ClosedJaxpr:
    """Write out calls of `jit` that hold no program of their own, and say nothing of layouts.

    Args:
        program: any closed jaxpr; loops, branches, derivatives and calls with these in them stay as
            they are.

    Returns:
        The same program; the one given if there are no such calls.
    """
    if not any(_is_call(one) for one in program.jaxpr.eqns):
        return program
    names: dict[Any, Any] = {}
    equations: list[Any] = []
    for one in program.jaxpr.eqns:
        operands = [_read(atom, names) for atom in one.invars]
        if not _is_call(one):
            equations.append(one.replace(invars=operands))
            continue
        inner = one.params["jaxpr"].jaxpr
        inside = dict(zip(inner.invars, operands, strict=True))
        for each in inner.eqns:  # one program may be called often: each call has its own results
            made = [Var(variable.aval) for variable in each.outvars]
            read = [_read(atom, inside) for atom in each.invars]
            equations.append(each.replace(invars=read, outvars=made))
            inside.update(zip(each.outvars, made, strict=True))
        names.update(zip(one.outvars, [_read(atom, inside) for atom in inner.outvars], strict=True))
    results = [_read(one, names) for one in program.jaxpr.outvars]
    return program.replace(jaxpr=program.jaxpr.replace(eqns=equations, outvars=results))


def _read(atom: Any, names: dict[Any, Any]) -> Any:
    return atom if isinstance(atom, Literal) else names.get(atom, atom)


def _is_call(equation: Any) -> bool:
    params = equation.params
    if equation.primitive.name != "jit" or params["jaxpr"].consts or equation.effects:
        return False
    if any(any(jaxprs_in_params(one.params)) for one in params["jaxpr"].eqns):
        return False
    layouts = (*params["in_shardings"], *params["out_shardings"])
    return not any(isinstance(one, Sharding) for one in layouts) and not any(
        params["donated_invars"]
    )
