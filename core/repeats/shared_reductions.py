"""What a loop reduces that an earlier one has reduced is read from there.

The backward of attention computes its softmax again: the same maxima and sums as the forward. Where
layers stay unrolled a compiler sees that both are equal and keeps all of the weights. Between two
loops it cannot see it. Maxima and sums are small beside what they are made of, so the first loop
keeps them; the rest is computed again, which takes no memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from isoshard.core.repeats.equation_flow import EquationFlow
from isoshard.core.repeats.loop_plans import LoopPlan
from isoshard.core.repeats.stacked_values import StackedArray, StackedValues

_SMALLER = 8
"""A reduction that is kept is so many times smaller than what it reads."""

_KEPT_APART = frozenset({"optimization_barrier"})


def shared(
    flow: EquationFlow, keys: Sequence[int], plans: Sequence[LoopPlan], stacks: StackedValues
) -> list[LoopPlan]:
    """Let loops read reductions that an earlier one has."""
    result: list[LoopPlan] = []
    for plan in plans:
        same = _Same(flow, keys, stacks)
        for earlier in result:
            if earlier.block.count == plan.block.count:
                same.note(earlier)
        result.append(dataclasses.replace(plan, sliced={**plan.sliced, **same.reductions(plan)}))
    return result


class _Same:
    """What earlier loops compute, by what it is computed of."""

    def __init__(self, flow: EquationFlow, keys: Sequence[int], stacks: StackedValues) -> None:
        """Nothing is known at first."""
        self._flow = flow
        self._keys = keys
        self._stacks = stacks
        self._made: dict[Hashable, tuple[tuple[int, ...], ...]] = {}
        self._alias: dict[int, int] = {}

    def note(self, plan: LoopPlan) -> None:
        """Remember what a loop computes."""
        for number in range(plan.block.period):
            key = self._key(plan, number)
            if key is not None:
                self._made.setdefault(key, self._results(plan, number))

    def reductions(self, plan: LoopPlan) -> dict[int, StackedArray]:
        """Equations of an iteration that need not run, and what has their results."""
        if not self._made:
            return {}
        reductions = {}
        for number in range(plan.block.period):
            outputs = self._made.get(self._key(plan, number))
            if outputs is None or number in plan.sliced:
                continue
            for own_arrays, other in zip(self._results(plan, number), outputs, strict=True):
                self._alias.update(zip(own_arrays, other, strict=True))
            array = self._stacks.exactly(outputs[0])
            if array is not None and array.origin == "made" and self._is_small(plan, number):
                reductions[number] = array
        return reductions

    def _key(self, plan: LoopPlan, number: int) -> Hashable:
        """Equal for equations that compute the same in all iterations; None: like no other."""
        block = plan.block
        time = block.start + number
        equation = self._flow.equations[time]
        if equation.effects or equation.primitive.name in _KEPT_APART:
            return None
        begin = block.first_operand(number)
        read: list[Hashable] = []
        for place in range(begin, begin + len(self._flow.operands[time])):
            values: list[int] = block.operands[:, place].tolist()
            if self._flow.same_literals(values):
                read.append((self._flow.literal(values[0]).tobytes(), self._flow.aval(values[0])))
            else:
                same = tuple([self._alias.get(value, value) for value in values])
                read.append(plan.in_order(same))
        return self._keys[time], equation.params.get("start_indices"), *read

    def _results(self, plan: LoopPlan, number: int) -> tuple[tuple[int, ...], ...]:
        first = int(plan.block.firsts[0])
        outputs = self._flow.outputs[plan.block.start + number]
        return tuple([plan.in_order(plan.block.made_as(output - first)) for output in outputs])

    def _is_small(self, plan: LoopPlan, number: int) -> bool:
        time = plan.block.start + number
        equation = self._flow.equations[time]
        if not equation.primitive.name.startswith("reduce_") or len(equation.outvars) > 1:
            return False
        largest = max(_bytes(self._flow.aval(operand)) for operand in self._flow.operands[time])
        return _SMALLER * _bytes(equation.outvars[0].aval) <= largest


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize
