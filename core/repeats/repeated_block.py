"""Equal iterations of a program, one after the other, and the sources of their operands.

An operand of an iteration is local (produced in the same iteration), carried (produced in the one
before), or comes from outside. Iterations form a block if all have the same locals and carries.

>>> import jax, numpy as np
>>> def program(x, scales):
...     for scale in scales:
...         x = jax.numpy.sin(x * scale)
...     return x
>>> flow = EquationFlow.of(jax.make_jaxpr(program)(1.0, [1.0, 2.0, 3.0, 4.0]))
>>> [block] = blocks_of(flow, start=0, period=2, count=4, at_least=3)
>>> block.carried                                  # the last value; at first value 0
{(-1, 0): [0]}
>>> block.outside[1]                               # one of the family of inputs each time
(1, 2, 3, 4)
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from isoshard.core.repeats.equation_flow import EquationFlow
from isoshard.core.runtime.jaxprs import equations, jaxprs_inside

_OUTSIDE = np.iinfo(np.int64).min
"""In a pattern, an operand that comes from outside."""

Matrix = np.ndarray[Any, np.dtype[np.int64]]


@dataclasses.dataclass(frozen=True, eq=False)
class RepeatedBlock:
    """Iterations that compute the same from different operands.

    Operands of an iteration have consecutive positions: first those of its first equation, ..

    Attributes:
        flow: of the program.
        start: the first equation of the first iteration.
        period: equations in one iteration.
        operands: of each iteration its operands: values, or literals below 0.
        firsts: of each iteration the first value that it produces.
        pattern: of each operand its offset from `firsts`: from 0 up a local, below 0 carried, or
            `_OUTSIDE`.
    """

    flow: EquationFlow
    start: int
    period: int
    operands: Matrix
    firsts: Matrix
    pattern: Matrix

    @property
    def count(self) -> int:
        """How many iterations there are."""
        return len(self.operands)

    @property
    def stop(self) -> int:
        """The first equation after the block."""
        return self.start + self.count * self.period

    @functools.cached_property
    def saved(self) -> int:
        """How many equations a loop saves, including those of subjaxprs."""
        iteration = self.flow.equations[self.start : self.start + self.period]
        return (self.count - 1) * sum(_inlined_count(equation) for equation in iteration)

    @functools.cached_property
    def output_count(self) -> int:
        """How many values an iteration produces."""
        return sum(
            len(outputs) for outputs in self.flow.outputs[self.start : self.start + self.period]
        )

    @functools.cached_property
    def carried(self) -> dict[tuple[int, int], list[int]]:
        """Operands by (output of the iteration before, counted from the end; first value)."""
        result: dict[tuple[int, int], list[int]] = {}
        for position in np.flatnonzero((self.pattern < 0) & (self.pattern != _OUTSIDE)).tolist():
            slot = int(self.pattern[position]), int(self.operands[0, position])
            result.setdefault(slot, []).append(position)
        return result

    @functools.cached_property
    def recurs(self) -> bool:
        """Whether a carry depends on an earlier one, so iterations cannot run in parallel."""
        bits = {slot: 1 << bit for bit, slot in enumerate({slot for slot, _ in self.carried})}
        needs = [0] * self.output_count
        positions = self.pattern.tolist()
        value = 0
        for index in range(self.period):
            begin = self.first_operand(index)
            count = len(self.flow.operands[self.start + index])
            needed = 0
            for position in positions[begin : begin + count]:
                needed |= needs[position] if position >= 0 else bits.get(position, 0)
            for _ in self.flow.outputs[self.start + index]:
                needs[value] = needed
                value += 1
        left = {bit: needs[index] for index, bit in bits.items()}
        while True:
            free = [bit for bit, needed in left.items() if not needed]
            if not free:
                return bool(left)
            done = sum(free)
            left = {bit: needed & ~done for bit, needed in left.items() if bit not in free}

    @functools.cached_property
    def outside(self) -> dict[int, tuple[int, ...]]:
        """Positions of operands from outside, with the value of each iteration."""
        outside = np.flatnonzero(self.pattern == _OUTSIDE)
        columns = self.operands[:, outside].T.tolist()
        return {
            position: tuple(values)
            for position, values in zip(outside.tolist(), columns, strict=True)
        }

    @functools.cached_property
    def equation_of(self) -> list[int]:
        """The equation of an iteration that each operand belongs to."""
        return [
            index for index in range(self.period) for _ in self.flow.operands[self.start + index]
        ]

    @functools.cached_property
    def _producers(self) -> list[int]:
        return [
            index for index in range(self.period) for _ in self.flow.outputs[self.start + index]
        ]

    def producer(self, output: int) -> int:
        """The equation of an iteration that produces an output."""
        return self._producers[output]

    @functools.cached_property
    def _operand_borders(self) -> list[int]:
        counts = [len(self.flow.operands[self.start + index]) for index in range(self.period)]
        return [0, *itertools.accumulate(counts)]

    def first_operand(self, equation: int) -> int:
        """The first operand of an equation of an iteration."""
        return self._operand_borders[equation]

    def iteration_of(self, value: int) -> tuple[int, int] | None:
        """The iteration that produces a value, and the output; None if none does."""
        time = self.flow.producers[value] if value >= 0 else -1
        if not self.start <= time < self.stop:
            return None
        iteration = (time - self.start) // self.period
        return iteration, value - int(self.firsts[iteration])

    def values_of(self, output: int) -> tuple[int, ...]:
        """The values of an output in all iterations."""
        return tuple((self.firsts + output).tolist())

    def restricted(self, begin: int, end: int) -> RepeatedBlock:
        """Some of the iterations."""
        return RepeatedBlock(
            self.flow,
            self.start + begin * self.period,
            self.period,
            self.operands[begin:end],
            self.firsts[begin:end],
            self.pattern,
        )


def blocks_of(
    flow: EquationFlow, start: int, period: int, count: int, at_least: int
) -> list[RepeatedBlock]:
    """The blocks among iterations with equal keys.

    Returns:
        Blocks without overlap, in order.
    """
    times = range(start, start + count * period)
    operands = np.array(
        [operand for time in times for operand in flow.operands[time]], dtype=np.int64
    )
    operands = operands.reshape(count, -1)
    firsts = np.array([flow.outputs[time][0] for time in times[::period]], dtype=np.int64)
    outputs = sum(len(flow.outputs[time]) for time in times[:period])
    from_first = operands - firsts[:, None]
    inside = (operands >= 0) & (from_first >= -outputs)
    inside[0] &= from_first[0] >= 0
    patterns = np.where(inside, from_first, _OUTSIDE)
    slices = _slice_positions(flow, start, period, count, inside)
    latest = np.where(inside, -1, operands).max(axis=1, initial=-1)
    blocks = []
    for begin, end in _intervals(patterns, slices, latest, firsts):
        if end - begin >= max(at_least, 2):
            rows = slice(begin, end)
            blocks.append(
                RepeatedBlock(
                    flow,
                    start + begin * period,
                    period,
                    operands[rows],
                    firsts[rows],
                    patterns[begin + 1],
                )
            )
    return blocks


def _intervals(
    patterns: Matrix, slices: Matrix, latest: Matrix, firsts: Matrix
) -> Iterator[tuple[int, int]]:
    """Ranges of iterations that form blocks; the first iteration may read carries from outside."""
    local = np.where(patterns < 0, _OUTSIDE, patterns)
    same_slices = (slices[1:] == slices[:-1]).all(axis=1)
    same_locals = (local[1:] == local[:-1]).all(axis=1) & same_slices
    same = (patterns[1:] == patterns[:-1]).all(axis=1) & same_slices
    count = len(patterns)
    begin = 0
    while begin < count:
        end = begin + 1
        while (
            end < count
            and (same if end > begin + 1 else same_locals)[end - 1]
            and latest[end] < firsts[begin]
        ):
            end += 1
        yield begin, end
        begin = end


def _inlined_count(equation: Any) -> int:
    inside = jaxprs_inside(equation.params)
    return 1 + sum(len(list(equations(program))) for program in inside)


def _slice_positions(
    flow: EquationFlow,
    start: int,
    period: int,
    count: int,
    inside: np.ndarray[Any, np.dtype[np.bool_]],
) -> Matrix:
    """Start indices of slices of local values, as ids; those of other values may differ."""
    columns = []
    position = 0
    for index in range(period):
        if flow.equations[start + index].primitive.name == "slice":
            times = range(start + index, start + count * period, period)
            begins = [flow.equations[time].params["start_indices"] for time in times]
            indices: dict[Any, int] = {}
            numbered = [indices.setdefault(begin, len(indices)) for begin in begins]
            columns.append(np.where(inside[:, position], numbered, -1))
        position += len(flow.operands[start + index])
    return np.array(columns, dtype=np.int64).reshape(-1, count).T
