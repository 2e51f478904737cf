"""A traced program as one list: calls opened, bodies of loops in their place with a count.

>>> import jax, jax.numpy as jnp
>>> def step(w, xs):
...     return jax.lax.scan(lambda x, row: (jnp.tanh(w @ x) + row, None), xs[0], xs)[0]
>>> flat = FlatProgram.of(jax.make_jaxpr(step)(jnp.ones((4, 4)), jnp.ones((3, 4))))
>>> [(one.primitive, one.times) for one in flat.equations if one.primitive == "dot_general"]
[('dot_general', 3)]

Values go by numbers. What a loop takes and gives is tied to what its body takes and gives: a `Tie`
says that two values are one, but for the leading axis of what is stacked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from ..axes.nested_programs import Body, bodies


@dataclasses.dataclass(frozen=True)
class FlatValue:
    """One array of the program.

    Attributes:
        shape: the global one.
        itemsize: bytes of an element.
        dtype: name of its dtype.
    """

    shape: tuple[int, ...]
    itemsize: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class FlatEquation:
    """One equation, in the order in which they run.

    Attributes:
        primitive: its name.
        source: the equation of the jaxpr.
        operands: numbers of values; -1: a literal.
        results: numbers of values.
        times: how often a step runs it.
    """

    primitive: str
    source: Any
    operands: tuple[int, ...]
    results: tuple[int, ...]
    times: int


@dataclasses.dataclass(frozen=True)
class Tie:
    """Two values that are one, across the border of a loop.

    Attributes:
        outer: the value outside.
        inner: the value inside.
        stacked: the outer one has a leading axis more.
    """

    outer: int
    inner: int
    stacked: bool = False


@dataclasses.dataclass
class FlatProgram:
    """A program as one list.

    Attributes:
        values: all arrays.
        equations: in the order in which they run.
        inputs: numbers of what the program takes.
        results: numbers of what it gives; -1: a literal.
        ties: across borders of loops.
        since: of values, the place in the list from which they take memory.
        until: of values, the last place in the list where they are needed.
    """

    values: list[FlatValue] = dataclasses.field(default_factory=list[FlatValue])
    equations: list[FlatEquation] = dataclasses.field(default_factory=list[FlatEquation])
    inputs: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    ties: list[Tie] = dataclasses.field(default_factory=list[Tie])
    since: dict[int, int] = dataclasses.field(default_factory=dict[int, int])
    until: dict[int, int] = dataclasses.field(default_factory=dict[int, int])

    @classmethod
    def of(cls, program: Any) -> FlatProgram:
        """Open a closed jaxpr.

        Args:
            program: it; nothing of it changes.
        """
        flat = cls()
        flat.inputs = tuple(flat._new(one) for one in program.jaxpr.invars)
        flat.results = tuple(flat._opened(program.jaxpr, flat.inputs, 1))
        flat._needed(flat.results)
        return flat

    def _new(self, variable: Any) -> int:
        shape = tuple(int(size) for size in getattr(variable.aval, "shape", ()))
        dtype = getattr(variable.aval, "dtype", None)
        self.values.append(FlatValue(shape, getattr(dtype, "itemsize", 4), str(dtype)))
        self.since[len(self.values) - 1] = len(self.equations)
        return len(self.values) - 1

    def _needed(self, numbers: Sequence[int]) -> None:
        self.until.update(dict.fromkeys(numbers, len(self.equations)))

    def _opened(self, jaxpr: Any, inputs: Sequence[int], times: int) -> list[int]:
        names = dict(zip(jaxpr.invars, inputs, strict=True))
        names.update({one: self._new(one) for one in jaxpr.constvars})

        def number(one: Any) -> int:
            return -1 if isinstance(one, Literal) else names[one]

        for equation in jaxpr.eqns:
            operands = tuple(number(one) for one in equation.invars)
            inside = bodies(equation)
            if len(inside) == 1 and inside[0].kind == "call":
                results = self._called(inside[0], operands, times)
            elif inside and inside[0].kind != "manual":
                results = self._looped(equation, inside, operands, times)
            else:
                results = [self._new(one) for one in equation.outvars]
                self._needed(operands)
                name = equation.primitive.name
                self.equations.append(FlatEquation(name, equation, operands, tuple(results), times))
            names.update(zip(equation.outvars, results, strict=True))
        return [number(one) for one in jaxpr.outvars]

    def _called(self, body: Body, operands: tuple[int, ...], times: int) -> list[int]:
        inputs = [-1] * len(body.jaxpr.invars)
        for link in body.operands:
            inputs[link.inside] = operands[link.outside]
        given = self._opened(body.jaxpr, self._filled(body, inputs), times)
        return [given[link.inside] for link in body.results]

    def _looped(
        self, equation: Any, inside: Sequence[Body], operands: tuple[int, ...], times: int
    ) -> list[int]:
        results = [self._new(one) for one in equation.outvars]
        for body in inside:
            carried = {inside for _, inside in body.carried}
            inputs = [-1] * len(body.jaxpr.invars)
            for link in body.operands:
                outer = operands[link.outside]
                if link.leading or link.inside in carried:
                    inner = inputs[link.inside] = self._new(body.jaxpr.invars[link.inside])
                    self._tied(outer, inner, link.leading)
                else:
                    inputs[link.inside] = outer
            inputs = self._filled(body, inputs)
            given = self._opened(body.jaxpr, inputs, times * body.times)
            for link in body.results:
                self._tied(results[link.outside], given[link.inside], link.leading)
            for result, place in body.carried:
                self._tied(inputs[place], given[result], False)
            self._needed(given)
        self._needed(operands)
        return results

    def _filled(self, body: Body, inputs: Sequence[int]) -> list[int]:
        """A value for each input; literals get one of their own."""
        pairs = zip(inputs, body.jaxpr.invars, strict=True)
        return [self._new(variable) if number < 0 else number for number, variable in pairs]

    def _tied(self, outer: int, inner: int, stacked: bool) -> None:
        if outer >= 0 and inner >= 0 and outer != inner:
            self.ties.append(Tie(outer, inner, stacked))
