"""Reductions that a loop reads from an earlier loop instead of recomputing them.

The backward of attention recomputes its softmax: the same maxima and sums as the forward. In an
unrolled program a compiler detects that both are equal and saves all of the weights. Between two
loops it cannot. Maxima and sums are small compared with their operands, so the first loop outputs
them; the rest is recomputed, which takes no memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

from isoshard.core.repeats.equation_flow import BARRIERS, EquationFlow, nbytes
from isoshard.core.repeats.loop_plans import LoopPlan
from isoshard.core.repeats.stacked_values import StackedArray, StackedValues

_SMALLER = 8
"""How many times smaller than its operand a reduction must be to be saved."""


def shared(
    flow: EquationFlow, keys: Sequence[int], plans: Sequence[LoopPlan], stacks: StackedValues
) -> list[LoopPlan]:
    """The plans, with loops that read reductions of earlier ones."""
    result: list[LoopPlan] = []
    for plan in plans:
        same = _Same(flow, keys, stacks)
        for earlier in result:
            if earlier.block.count == plan.block.count:
                same.note(earlier)
        result.append(dataclasses.replace(plan, sliced={**plan.sliced, **same.reductions(plan)}))
    return result


class _Same:
    """The results of earlier loops, by equation and operands."""

    def __init__(self, flow: EquationFlow, keys: Sequence[int], stacks: StackedValues) -> None:
        """Start without results."""
        self._flow = flow
        self._keys = keys
        self._stacks = stacks
        self._results_of: dict[Hashable, tuple[tuple[int, ...], ...]] = {}
        self._alias: dict[int, int] = {}

    def note(self, plan: LoopPlan) -> None:
        """Record the results of a loop."""
        for index in range(plan.block.period):
            key = self._key(plan, index)
            if key is not None:
                self._results_of.setdefault(key, self._results(plan, index))

    def reductions(self, plan: LoopPlan) -> dict[int, StackedArray]:
        """Equations of an iteration that need not run, with the arrays of their results."""
        if not self._results_of:
            return {}
        reductions = {}
        for index in range(plan.block.period):
            outputs = self._results_of.get(self._key(plan, index))
            if outputs is None or index in plan.sliced:
                continue
            for values, other in zip(self._results(plan, index), outputs, strict=True):
                self._alias.update(zip(values, other, strict=True))
            array = self._stacks.exactly(outputs[0])
            if array is not None and array.origin == "output" and self._is_small(plan, index):
                reductions[index] = array
        return reductions

    def _key(self, plan: LoopPlan, index: int) -> Hashable:
        """A key, equal for equations that compute the same in all iterations; None: unique."""
        block = plan.block
        time = block.start + index
        equation = self._flow.equations[time]
        if equation.effects or equation.primitive.name in BARRIERS:
            return None
        begin = block.first_operand(index)
        read: list[Hashable] = []
        for position in range(begin, begin + len(self._flow.operands[time])):
            values: list[int] = block.operands[:, position].tolist()
            if self._flow.same_literals(values):
                read.append((self._flow.literal(values[0]).tobytes(), self._flow.aval(values[0])))
            else:
                same = tuple([self._alias.get(value, value) for value in values])
                read.append(plan.in_order(same))
        return self._keys[time], equation.params.get("start_indices"), *read

    def _results(self, plan: LoopPlan, index: int) -> tuple[tuple[int, ...], ...]:
        first = int(plan.block.firsts[0])
        outputs = self._flow.outputs[plan.block.start + index]
        return tuple([plan.in_order(plan.block.values_of(output - first)) for output in outputs])

    def _is_small(self, plan: LoopPlan, index: int) -> bool:
        time = plan.block.start + index
        equation = self._flow.equations[time]
        if not equation.primitive.name.startswith("reduce_") or len(equation.outvars) > 1:
            return False
        largest = max(nbytes(self._flow.aval(operand)) for operand in self._flow.operands[time])
        return _SMALLER * nbytes(equation.outvars[0].aval) <= largest
