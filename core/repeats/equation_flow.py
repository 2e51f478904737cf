"""The data flow of a jaxpr as indices: the equation that produces a value, and those that read it.

>>> import jax
>>> flow = EquationFlow.of(jax.make_jaxpr(lambda x, y: (x * y + 2.0, x - y)[0])(1.0, 2.0))
>>> [eqn.primitive.name for eqn in flow.equations]           # the difference is not needed
['mul', 'add']
>>> flow.operands                                            # -1 is the first literal
[(0, 1), (2, -1)]
>>> flow.producers[2:], flow.results
([0, 1], [3])
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from isoshard.core.runtime._jax_internals.jaxpr_classes import ClosedJaxpr, Literal
from isoshard.core.runtime.jaxprs import needed, opened

BARRIERS = frozenset({"optimization_barrier"})
"""Primitives that must not be merged with equal ones."""


def nbytes(aval: Any) -> int:
    """Bytes of a value, by its aval."""
    return math.prod(aval.shape) * aval.dtype.itemsize


@dataclasses.dataclass(frozen=True, eq=False)
class EquationFlow:
    """The data flow of a jaxpr, without equations that no result needs.

    A value is an index: inputs first, then constants, then results of equations in order. An
    operand is a value, or `-1 - k` for literal k.

    Attributes:
        program: the jaxpr.
        equations: in order.
        operands: of each equation.
        outputs: the values that each equation produces.
        avals: of each value.
        producers: of each value the number of its equation; -1 if none makes it.
        readers: of each value the equations that read it, in order.
        literals: in order of appearance.
        results: of the program, as operands.
    """

    program: ClosedJaxpr
    equations: list[Any]
    operands: list[tuple[int, ...]]
    outputs: list[tuple[int, ...]]
    avals: list[Any]
    producers: list[int]
    readers: list[list[int]]
    literals: list[Any]
    results: list[int]

    @property
    def inputs(self) -> int:
        """How many inputs the program has; these are the first values."""
        return len(opened(self.program).invars)

    @functools.cached_property
    def joint_reads(self) -> list[tuple[int, list[int]]]:
        """Equations that read several inputs of the program, with these inputs."""
        inputs = self.inputs
        result = [
            (time, [operand for operand in dict.fromkeys(operands) if 0 <= operand < inputs])
            for time, operands in enumerate(self.operands)
            if len(operands) > 1
        ]
        return [(time, some) for time, some in result if len(some) > 1]

    @functools.cached_property
    def reads(self) -> tuple[np.ndarray[Any, np.dtype[np.int64]], ...]:
        """Pairs of equations, as two arrays: a reader, and the producer of a value it reads."""
        counts = [len(operand) for operand in self.operands]
        times = np.repeat(np.arange(len(counts)), counts)
        operands = np.array([value for read in self.operands for value in read], dtype=np.int64)
        makers = np.array([*self.producers, -1], dtype=np.int64)[np.maximum(operands, -1)]
        reads = (operands >= 0) & (makers >= 0)
        return times[reads], makers[reads]

    @classmethod
    def of(cls, program: ClosedJaxpr) -> EquationFlow:
        """The flow of a program."""
        jaxpr = opened(program)
        equations = needed(jaxpr.eqns, jaxpr.outvars)
        inputs = [*jaxpr.invars, *jaxpr.constvars]
        indices = {variable: index for index, variable in enumerate(inputs)}
        avals = [variable.aval for variable in inputs]
        producers = [-1] * len(inputs)
        literals: list[Any] = []

        def operand(atom: Any) -> int:
            if isinstance(atom, Literal):
                literals.append(atom)
                return -len(literals)
            return indices[atom]

        operands, outputs = [], []
        for time, equation in enumerate(equations):
            operands.append(tuple([operand(atom) for atom in equation.invars]))
            begin = len(avals)
            for variable in equation.outvars:
                indices[variable] = len(avals)
                avals.append(variable.aval)
                producers.append(time)
            outputs.append(tuple(range(begin, len(avals))))
        results = [operand(atom) for atom in jaxpr.outvars]
        readers = readers_of(operands, len(avals))
        return cls(
            program, equations, operands, outputs, avals, producers, readers, literals, results
        )

    def variables(self) -> list[Any]:
        """The program's variable of each value."""
        jaxpr = opened(self.program)
        variables = [variable for equation in self.equations for variable in equation.outvars]
        return [*jaxpr.invars, *jaxpr.constvars, *variables]

    def aval(self, operand: int) -> Any:
        """The aval of an operand.

        Args:
            operand: a value or a literal.
        """
        return self.avals[operand] if operand >= 0 else self.literals[-1 - operand].aval

    def literal(self, operand: int) -> np.ndarray[Any, Any]:
        """The value of a literal, in its dtype."""
        literal = self.literals[-1 - operand]
        return np.asarray(literal.val, literal.aval.dtype)

    def same_literals(self, operands: Sequence[int]) -> bool:
        """Whether operands are literals with one value."""
        return (
            max(operands) < 0
            and len({self.literal(operand).tobytes() for operand in operands}) == 1
        )


def readers_of(
    operands: Sequence[tuple[int, ...]], values: int, skipped: Collection[int] = ()
) -> list[list[int]]:
    """Of each value the equations that read it, in order."""
    readers: list[list[int]] = [[] for _ in range(values)]
    for time, read in enumerate(operands):
        if time not in skipped:
            for value in read if len(read) < 2 else {*read}:
                if value >= 0:
                    readers[value].append(time)
    return readers
