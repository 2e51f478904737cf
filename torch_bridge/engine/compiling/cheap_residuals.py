"""Residuals that a backward loop computes again, as XLA does where no loops are.

A loop over layers stacks whatever the backward loop reads of it. In a program without loops, XLA
computes sums, products and the like again where they are read, and keeps what they are made of; it
does not look across two loops. So that is done here: of the arrays that one `scan` makes for
another, those go that cheap operations give from the others, from what the first loop reads anyway
(weights), and from constants.

>>> import jax.numpy as jnp
>>> def layer(x, w):
...     y = x @ w
...     return jnp.tanh(y), (y, y + 1.0, 2.0 * y)
>>> def program(x, w):
...     x, kept = jax.lax.scan(layer, x, w)
...     return jax.lax.scan(lambda g, k: (g * k[0] * k[1] * k[2], None), x, kept, reverse=True)[0]
>>> before = jax.make_jaxpr(program)(jnp.ones((2, 2)), jnp.ones((3, 2, 2)))
>>> after = with_cheap_residuals(before)
>>> [len(loop.outvars) for loop in before.eqns], [len(loop.outvars) for loop in after.eqns]
([4, 1], [2, 1])
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, Literal, Var, jaxprs_in_params

_CHEAP = frozenset(
    (
        *("abs", "add", "add_any", "and", "broadcast_in_dim", "ceil", "clamp", "copy"),
        *("convert_element_type", "eq", "expand_dims", "floor", "ge", "gt", "integer_pow"),
        *("is_finite", "iota", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "or"),
        *("optimization_barrier", "reshape", "round", "select_n", "sharding_constraint", "sign"),
        *("slice", "square", "squeeze", "stop_gradient", "sub", "transpose", "xor"),
    )
)
"""What XLA computes again rather than keep."""
_CALLS = frozenset(("jit", "pjit", "closed_call", "custom_jvp_call"))
_NAMES: Any = DebugInfo("cheap_residuals", "loop", None, None)


def with_cheap_residuals(program: ClosedJaxpr) -> ClosedJaxpr:
    """A program that computes the same, with fewer arrays from one loop to another.

    Args:
        program: a traced function.
    """
    equations = list(program.jaxpr.eqns)
    readers: dict[Any, list[tuple[int, int]]] = collections.defaultdict(list)
    for place, equation in enumerate(equations):
        for number, operand in enumerate(equation.invars):
            if isinstance(operand, Var):
                readers[operand].append((place, number))
    results = {one for one in program.jaxpr.outvars if isinstance(one, Var)}
    for place, equation in enumerate(equations):
        if not _is_loop(equation):
            continue
        maker = _Loop.of(equation)
        stacked = {
            variable: result
            for variable, result in zip(maker.stacked, maker.given, strict=True)
            if isinstance(result, Var) and variable not in results
        }
        kept = {
            variable
            for variable in stacked
            if not all(
                _reads_along(equations[at], number, maker) for at, number in readers[variable]
            )
        }
        cheap = _cheap(maker, {v: r for v, r in stacked.items() if v not in kept})
        users = sorted({at for variable in cheap for at, _ in readers[variable]})
        for at in users:
            equations[at] = _recomputing(_Loop.of(equations[at]), maker, cheap).equation()
        if cheap:
            equations[place] = maker.without(cheap).equation()
            return with_cheap_residuals(_with(program, equations))
    return program


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A `scan`, taken apart.

    Attributes:
        made: the equation.
        consts: operands that are the same in each iteration, by the variable of the body.
        carries: what goes from iteration to iteration, likewise.
        read: arrays of which each iteration reads an element, likewise.
        stacked: the arrays that it makes.
        given: the elements of those, in the body.
        equations: of the body.
        carried: results of the body that the next iteration gets.
    """

    made: Any
    consts: dict[Any, Any]
    carries: dict[Any, Any]
    read: dict[Any, Any]
    stacked: list[Any]
    given: list[Any]
    equations: list[Any]
    carried: list[Any]

    @staticmethod
    def of(equation: Any) -> _Loop:
        """Of an equation."""
        params, body = equation.params, equation.params["jaxpr"].jaxpr
        consts, carries = params["num_consts"], params["num_carry"]
        pairs = list(zip(body.invars, equation.invars, strict=True))
        return _Loop(
            equation,
            dict(pairs[:consts]),
            dict(pairs[consts : consts + carries]),
            dict(pairs[consts + carries :]),
            list(equation.outvars[carries:]),
            list(body.outvars[carries:]),
            list(body.eqns),
            list(body.outvars[:carries]),
        )

    def without(self, stacked: Mapping[Any, Any]) -> _Loop:
        """The same loop without some of the arrays that it makes."""
        pairs = zip(self.stacked, self.given, strict=True)
        left = [(variable, result) for variable, result in pairs if variable not in stacked]
        return dataclasses.replace(
            self, stacked=[one for one, _ in left], given=[one for _, one in left]
        )

    def equation(self) -> Any:
        """The loop as an equation."""
        params, carries = self.made.params, len(self.carries)
        given = {**self.consts, **self.carries, **self.read}
        effects = params["jaxpr"].jaxpr.effects
        linear = {"linear": (False,) * len(given)} if "linear" in params else {}  # jax 0.9
        outvars = [*self.carried, *self.given]
        body = Jaxpr([], list(given), outvars, self.equations, effects, _NAMES)
        return self.made.replace(
            invars=list(given.values()),
            outvars=[*self.made.outvars[:carries], *self.stacked],
            params={
                **params,
                "jaxpr": ClosedJaxpr(body, ()),
                "num_consts": len(self.consts),
                **linear,
            },
        )


def _is_loop(equation: Any) -> bool:
    return equation.primitive.name == "scan" and not equation.params["jaxpr"].consts


def _reads_along(equation: Any, number: int, maker: _Loop) -> bool:
    """Whether an operand is an array whose elements another loop reads, each in its iteration."""
    if not _is_loop(equation) or equation.params["length"] != maker.made.params["length"]:
        return False
    return number >= equation.params["num_consts"] + equation.params["num_carry"]


def _cheap(loop: _Loop, stacked: Mapping[Any, Any]) -> dict[Any, list[Any]]:
    """The arrays that need not be made, and the equations of the body that give an element.

    Args:
        loop: makes them.
        stacked: arrays that only other loops read, and their elements.
    """
    makers = {out: at for at, one in enumerate(loop.equations) for out in one.outvars}
    order = sorted(
        (one for one in stacked if stacked[one] in makers),
        key=lambda one: makers[stacked[one]],
        reverse=True,
    )
    there = {*loop.consts, *loop.read, *loop.given}
    found: dict[Any, list[Any]] = {}
    for variable in order:
        result = stacked[variable]
        if loop.given.count(result) > 1:
            continue
        there.discard(result)
        needed = _equations(loop, makers, result, there)
        if needed is None:
            there.add(result)
        else:
            found[variable] = needed
    # An element that is left out is computed from what is there, so nothing else may need it.
    return {one: _equations(loop, makers, stacked[one], there) or [] for one in found}


def _equations(
    loop: _Loop, makers: Mapping[Any, int], result: Any, there: Iterable[Any]
) -> list[Any] | None:
    """The cheap equations that give a result from what is there; None if there are none such."""
    needed: set[int] = set()
    pending = [result]
    while pending:
        one = pending.pop()
        if one in there:
            continue
        at = makers.get(one)
        if at is None or not _is_cheap(loop.equations[at]) or len(needed) > _MOST:
            return None
        if at not in needed:
            needed.add(at)
            pending += [var for var in loop.equations[at].invars if isinstance(var, Var)]
    return [loop.equations[at] for at in sorted(needed)]


_MOST = 32
"""So many equations are computed again for one residual."""


def _is_cheap(equation: Any) -> bool:
    if equation.effects:
        return False
    name = equation.primitive.name
    if name in _CALLS:
        inside = jaxprs_in_params(equation.params)
        return all(_is_cheap(one) for program in inside for one in program.eqns)
    return name in _CHEAP


def _recomputing(user: _Loop, maker: _Loop, cheap: Mapping[Any, list[Any]]) -> _Loop:
    """A loop that computes elements which it read before."""
    of_array = {array: element for element, array in user.read.items()}
    elements = dict(zip(maker.stacked, maker.given, strict=True))
    known: dict[Any, Any] = {}
    for array, element in elements.items():
        if array in of_array and array not in cheap:
            known[element] = of_array[array]
    consts, read = dict(user.consts), dict(user.read)
    taken = {operand: variable for variable, operand in consts.items() if isinstance(operand, Var)}
    first: list[Any] = []
    done: set[int] = set()

    def atom(one: Any) -> Any:
        if not isinstance(one, Var) or one in known:
            return known.get(one, one) if isinstance(one, Var) else one
        if one in maker.read:
            array = maker.read[one]
            if array not in of_array:
                of_array[array] = one
                read[one] = array
            known[one] = of_array[array]
        elif one in maker.consts:
            operand = maker.consts[one]
            if isinstance(operand, Literal) or operand not in taken:
                consts[one] = operand
                known[one] = one
            else:
                known[one] = taken[operand]
        elif one in elements.values():
            array = next(array for array, element in elements.items() if element is one)
            of_array[array] = known[one] = one
            read[one] = array
        return known.get(one, one)

    instead: dict[Any, Any] = {}
    mine = [array for array in cheap if array in of_array]
    needed = {id(one): one for array in mine for one in cheap[array]}
    for equation in maker.equations:
        if id(equation) in needed and id(equation) not in done:
            done.add(id(equation))
            first.append(equation.replace(invars=[atom(one) for one in equation.invars]))
            known.update((one, one) for one in equation.outvars)
    for array in mine:
        variable = of_array[array]
        instead[variable] = elements[array]
        del read[variable]

    def replaced(some: Sequence[Any]) -> list[Any]:
        return [instead.get(one, one) if isinstance(one, Var) else one for one in some]

    return dataclasses.replace(
        user,
        consts=consts,
        read=read,
        equations=[*first, *[one.replace(invars=replaced(one.invars)) for one in user.equations]],
        carried=replaced(user.carried),
        given=replaced(user.given),
    )


def _with(program: ClosedJaxpr, equations: Sequence[Any]) -> ClosedJaxpr:
    return ClosedJaxpr(program.jaxpr.replace(eqns=list(equations)), program.consts)
