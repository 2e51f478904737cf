"""The programs inside an equation: of calls, loops and branches.

>>> import jax
>>> import jax.numpy as jnp
>>> def layers(x, w):
...     return jax.lax.scan(lambda h, one: (jnp.tanh(h @ one), None), x, w)[0]
>>> program = jax.make_jaxpr(layers)(jnp.ones((8, 4)), jnp.ones((12, 4, 4)))
>>> (body,) = bodies(program.eqns[0])
>>> body.times, body.operands, body.carried
(12, (Link(0, 0), Link(1, 1, leading=True)), ((0, 0),))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ._jax_internals.jaxpr_classes import JaxprEqn
from .jaxprs import CALLS, is_jaxpr, opened, scan_counts


@dataclasses.dataclass(frozen=True)
class Link:
    """A value outside of a program and the same one inside.

    Attributes:
        outside: number of the equation's operand, or result.
        inside: number of the program's input, or result.
        leading: outside it has a leading axis more, of which each run sees one row.
    """

    outside: int
    inside: int
    leading: bool = False

    def __repr__(self) -> str:
        """Short, as it is written."""
        leading = ", leading=True" if self.leading else ""
        return f"Link({self.outside}, {self.inside}{leading})"


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """One program inside an equation.

    Attributes:
        jaxpr: an open `jax.extend.core.Jaxpr`.
        operands: which operand is which input.
        results: which result is which of the program's results.
        carried: (result, input) of the program that are one value from run to run.
        times: how often it runs; 1 for a `while`, whose count is unknown.
        kind: "call", "scan", "while", "condition" (of a while), "branch", "manual" (shapes inside
            are of one device).
    """

    jaxpr: Any
    operands: tuple[Link, ...]
    results: tuple[Link, ...]
    carried: tuple[tuple[int, int], ...] = ()
    times: int = 1
    kind: str = "call"


_CALLS = {
    **CALLS,
    "custom_lin": "",
    "run_state": "",
    "custom_partitioning": "call",
    "custom_partitioning_call": "call",
    "shard_map": "jaxpr",
}
"""Primitive that calls one program -> the parameter that has it."""


def bodies(equation: JaxprEqn) -> tuple[Body, ...]:
    """The programs inside an equation, in the order in which they run.

    Returns:
        None of most equations; of a `scan` or a call one, of a `while` its condition and its body,
        of a `cond` its branches.
    """
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return (_scan(params),)
    if name == "while":
        return _while(params)
    if name == "cond":
        return tuple(_branch(branch, len(equation.outvars)) for branch in params["branches"])
    key = _CALLS.get(name)
    if not key or key not in params:
        return ()
    if not is_jaxpr(params[key]):
        return ()
    jaxpr = opened(params[key])
    shift = len(equation.invars) - len(jaxpr.invars)
    if shift < 0:
        return ()
    kind = "manual" if name == "shard_map" else "call"
    operands = tuple(Link(n + shift, n) for n in range(len(jaxpr.invars)))
    results = tuple(Link(n, n) for n in range(len(equation.outvars)))
    return (Body(jaxpr, operands, results, kind=kind),)


def _scan(params: Mapping[str, Any]) -> Body:
    jaxpr = opened(params["jaxpr"])
    constants, carry = scan_counts(params)
    rows = constants + carry
    return Body(
        jaxpr,
        tuple(Link(n, n, n >= rows) for n in range(len(jaxpr.invars))),
        tuple(Link(n, n, n >= carry) for n in range(len(jaxpr.outvars))),
        tuple((n, constants + n) for n in range(carry)),
        params["length"],
        "scan",
    )


def _while(params: Mapping[str, Any]) -> tuple[Body, Body]:
    condition, body = opened(params["cond_jaxpr"]), opened(params["body_jaxpr"])
    first, second = params["cond_nconsts"], params["body_nconsts"]
    carry = len(body.invars) - second
    return (
        Body(
            condition,
            tuple(Link(n, n) for n in range(first))
            + tuple(Link(first + second + n, first + n) for n in range(carry)),
            (),
            kind="condition",
        ),
        Body(
            body,
            tuple(Link(first + n, n) for n in range(second + carry)),
            tuple(Link(n, n) for n in range(carry)),
            tuple((n, second + n) for n in range(carry)),
            kind="while",
        ),
    )


def _branch(program: Any, results: int) -> Body:
    jaxpr = opened(program)
    return Body(
        jaxpr,
        tuple(Link(n + 1, n) for n in range(len(jaxpr.invars))),
        tuple(Link(n, n) for n in range(results)),
        kind="branch",
    )
