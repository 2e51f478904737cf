"""Values that a loop recomputes instead of reading them from an earlier loop.

The forward of a layer produces many values that its backward reads. In an unrolled program a
compiler fuses: it saves some, and recomputes others from them by elementwise operations. Between
two loops it cannot do so, and each of these values would be an array over all layers. So a later
loop recomputes cheap equations of an earlier one from values that it reads anyway, and reads one
array instead of several that are computed from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from isoshard.core.repeats.equation_flow import EquationFlow, nbytes
from isoshard.core.repeats.loop_plans import LoopPlan, RecomputedEquation
from isoshard.core.repeats.stacked_values import StackedValues
from isoshard.core.runtime.jaxprs import jaxprs_inside

Values = tuple[int, ...]
"""The value of each iteration, in the order of arrays."""

_CHEAP = frozenset(
    (
        *("abs", "add", "add_any", "and", "broadcast_in_dim", "clamp", "convert_element_type"),
        *("copy", "div", "eq", "ge", "gt", "integer_pow", "iota", "is_finite", "le", "lt", "max"),
        *("min", "mul", "ne", "neg", "not", "or", "reshape", "rsqrt", "select_n", "sign", "sqrt"),
        *(
            "name",
            "one_minus_square",
            "square",
            "squeeze",
            "stop_gradient",
            "sub",
            "transpose",
            "xor",
        ),
    )
)
"""Primitives that cost no more than reading their results. Exponentials cost more."""


def recomputed(
    flow: EquationFlow, plans: Sequence[LoopPlan], stacks: StackedValues
) -> list[LoopPlan]:
    """The plans, with loops that recompute cheap values of earlier ones."""
    return [_Later(flow, plans, stacks, plan).changed() for plan in plans]


class _Later:
    """A loop, and the equations of earlier loops that it recomputes."""

    def __init__(
        self,
        flow: EquationFlow,
        plans: Sequence[LoopPlan],
        stacks: StackedValues,
        plan: LoopPlan,
    ) -> None:
        """Start without recomputed equations."""
        self._flow = flow
        self._plans = plans
        self._stacks = stacks
        self._plan = plan
        self._reads = dict(plan.reads)
        self._repeated: dict[tuple[int, int], RecomputedEquation] = {}

    def changed(self) -> LoopPlan:
        for values in sorted(self._plan.reads):
            array, where = self._plan.reads[values]
            if array.origin == "output" and where is None and array.owner < len(self._plans):
                earlier = self._plans[array.owner]
                position = earlier.block.producer(array.slot)
                if self._fits(earlier) and self._can(array.owner, position, {}):
                    del self._reads[values]
                    self._repeat(array.owner, position)
        self._read_sources()
        order = [self._repeated[value] for value in sorted(self._repeated)]
        return dataclasses.replace(self._plan, reads=self._reads, repeated=tuple(order))

    def _read_sources(self) -> None:
        """Read the sources of several arrays instead of these, where they have fewer bytes."""
        by_sources: dict[frozenset[Values], list[Values]] = {}
        for values in sorted(self._reads):
            array, where = self._reads[values]
            if array.origin != "output" or where is not None or not self._alone(values):
                continue
            if array.owner < len(self._plans) and self._fits(self._plans[array.owner]):
                position = self._plans[array.owner].block.producer(array.slot)
                sources = self._sources(array.owner, position)
                if sources:
                    by_sources.setdefault(sources, []).append(values)
        for sources, several in by_sources.items():
            if self._bytes(sources) < self._bytes(several):
                for values in sources:
                    array = self._stacks.exactly(values)
                    assert array is not None
                    self._reads[values] = array, None
                for values in several:
                    array, _ = self._reads.pop(values)
                    self._repeat(array.owner, self._plans[array.owner].block.producer(array.slot))

    def _alone(self, values: Values) -> bool:
        """Whether no other loop reads an array."""
        return sum(values in plan.reads for plan in self._plans) == 1

    def _bytes(self, several: Iterable[Values]) -> int:
        return sum(nbytes(self._flow.avals[values[0]]) for values in several)

    def _sources(self, loop: int, position: int) -> frozenset[Values] | None:
        """The arrays that this loop needs in addition to recompute an equation.

        None if a source is no array of the earlier loop, or the equation is not cheap.
        """
        if not self._cheap(loop, position):
            return None
        sources: set[Values] = set()
        for operand in self._operands(loop, position):
            if self._has(loop, operand, {}):
                continue
            array = self._stacks.exactly(operand) if isinstance(operand, tuple) else None
            if array is None or array.origin != "output" or array.owner != loop:
                return None
            further = self._sources(loop, self._plans[loop].block.producer(array.slot))
            sources |= further or {array.members}
        return frozenset(sources)

    def _fits(self, earlier: LoopPlan) -> bool:
        return earlier is not self._plan and earlier.block.count == self._plan.block.count

    def _can(self, loop: int, position: int, existing: dict[int, bool]) -> bool:
        """Whether an equation is cheap, and this loop has or can recompute its operands."""
        if position not in existing:
            existing[position] = False
            existing[position] = self._cheap(loop, position) and all(
                self._has(loop, operand, existing) for operand in self._operands(loop, position)
            )
        return existing[position]

    def _has(self, loop: int, operand: int | Values, existing: dict[int, bool]) -> bool:
        if isinstance(operand, int):
            return True
        if operand in self._reads:
            return self._reads[operand][1] is None
        array = self._stacks.exactly(operand)
        if array is None:
            return False
        if array.origin == "output" and array.owner == loop:
            return self._can(loop, self._plans[loop].block.producer(array.slot), existing)
        return array.origin in ("input", "literals", "sliced") and len(array.members) == len(
            operand
        )

    def _cheap(self, loop: int, position: int) -> bool:
        block = self._plans[loop].block
        return position not in self._plans[loop].sliced and _is_cheap(
            self._flow.equations[block.start + position]
        )

    def _operands(self, loop: int, position: int) -> list[int | Values]:
        """The operands of an earlier loop's equation, as values of all iterations."""
        plan = self._plans[loop]
        block = plan.block
        operands: list[int | Values] = []
        begin = block.first_operand(position)
        for index in range(begin, begin + len(self._flow.operands[block.start + position])):
            values = plan.in_order(tuple(block.operands[:, index].tolist()))
            if len(set(values)) == 1 or self._flow.same_literals(values):
                operands.append(values[0])
            else:
                operands.append(values)
        return operands

    def _repeat(self, loop: int, position: int) -> None:
        """Recompute an equation, and those that it depends on."""
        if (loop, position) in self._repeated:
            return
        plan = self._plans[loop]
        operands = self._operands(loop, position)
        for operand in operands:
            if isinstance(operand, tuple) and operand not in self._reads:
                array = self._stacks.exactly(operand)
                if array is not None and array.origin == "output" and array.owner == loop:
                    self._repeat(loop, plan.block.producer(array.slot))
                elif array is not None:
                    self._reads[operand] = array, None
        time = plan.block.start + position
        first = int(plan.block.firsts[0])
        results = [
            plan.in_order(plan.block.values_of(value - first)) for value in self._flow.outputs[time]
        ]
        self._repeated[loop, position] = RecomputedEquation(time, tuple(operands), tuple(results))


def _is_cheap(equation: Any) -> bool:
    inside = list(jaxprs_inside(equation.params))
    if equation.primitive.name in ("jit", "pjit"):
        return all(_is_cheap(eqn) for program in inside for eqn in program.eqns)
    return equation.primitive.name in _CHEAP and not inside
