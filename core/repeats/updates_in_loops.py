"""Optimizer updates in the loop that computes the gradients.

Batched over layers (`side_by_side.py`) an optimizer needs the gradients of all layers as one array:
memory that is zeroed before the loop, written by it and read after it. In the loop the update of a
layer follows its gradient. Each iteration replaces its own row of the moments, which a compiler
does in place if nothing else in the loop reads that row. The loop's layers read parameters, so a
new parameter that is computed from moments alone (Adam, momentum) is computed after the loop,
batched; otherwise the loop outputs an array of new parameters.

Small parameters remain batched: for them more equations in the loop would cost more than they save.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from isoshard.core.repeats.equation_flow import EquationFlow, nbytes
from isoshard.core.repeats.equation_order import Step, StepOrder
from isoshard.core.repeats.loop_plans import LoopPlan
from isoshard.core.repeats.side_by_side import BatchedEquation, SideBySide
from isoshard.core.repeats.stacked_values import StackedArray

_LARGE = 2**16
"""The fewest bytes of a gradient whose parameter is updated in the loop."""


@dataclasses.dataclass(frozen=True, eq=False)
class LoopUpdates:
    """Batched equations that run in a loop, a row in each iteration.

    Attributes:
        batches: their indices, in order.
        replaced: results that replace the rows of an input in place, with that input.
    """

    batches: tuple[int, ...] = ()
    replaced: Mapping[StackedArray, StackedArray] = dataclasses.field(default_factory=dict)


def updates_in(
    flow: EquationFlow,
    plans: Sequence[LoopPlan],
    side: SideBySide,
    results: Iterable[int | StackedArray],
    new_of: Mapping[StackedArray, StackedArray],
    order: StepOrder,
) -> dict[int, LoopUpdates]:
    """The updates that can run in loops."""
    updates: dict[int, LoopUpdates] = {}
    taken: set[int] = set()
    step_of = functools.cache(order.step_of)

    @functools.cache
    def reading(array: StackedArray) -> frozenset[Step]:
        return frozenset(step_of(time) for member in array.members for time in flow.readers[member])

    for index, plan in enumerate(plans):
        after = order.following(("loop", index))
        member = _Updates(flow, plan, side, set(results), new_of, index, after, step_of, reading)
        batches = member.batches()
        if batches and taken.isdisjoint(batches):
            taken.update(batches)
            updates[index] = LoopUpdates(tuple(batches), member.replaced(batches))
    return updates


class _Updates:
    """Batched equations after one loop."""

    def __init__(
        self,
        flow: EquationFlow,
        plan: LoopPlan,
        side: SideBySide,
        results: set[int | StackedArray],
        new_of: Mapping[StackedArray, StackedArray],
        loop: int,
        after: set[Step],
        step_of: Callable[[int], Step],
        reading: Callable[[StackedArray], frozenset[Step]],
    ) -> None:
        """See `updates_in`."""
        self._flow = flow
        self._plan = plan
        self._loop = loop
        self._side = side
        self._results = results
        self._new_of = new_of
        self._program_results = set(flow.results)
        self._after = after
        self._step = step_of
        self._reading = reading

    def batches(self) -> list[int]:
        """The batched equations that run in the loop, in order."""
        gradients = dict.fromkeys(
            array
            for batch in self._side.batches
            for array in _arrays(batch)
            if array.origin == "output"
            and array.owner == self._loop
            and array not in self._results
            and nbytes(self._flow.aval(array.members[0])) >= _LARGE
        )
        batches: dict[int, None] = {}
        for gradient in gradients:
            batches.update(dict.fromkeys(self._of(gradient)))
        return list(batches)

    def _of(self, gradient: StackedArray) -> list[int]:
        """The batches that apply a gradient in the loop; none if they would output more arrays."""
        inside = self._inside(gradient)
        if not self._readers(gradient) <= {*inside}:
            return []
        inside = self._without_late(inside, gradient)
        replaced = self.replaced(inside)
        outputs = [value for index in inside for value in self._side.batches[index].results]
        if any(
            value not in replaced and not self._readers(value) <= {*inside} for value in outputs
        ):
            return []
        return self._with_makers(inside)

    def replaced(self, inside: Collection[int]) -> dict[StackedArray, StackedArray]:
        """The results that replace the rows of an input in place, with that input."""
        return {
            new: old
            for new, old in self._new_of.items()
            if new.origin == "batched" and new.owner in inside
            if self._is_in_place(new, old, inside)
        }

    def _is_in_place(self, new: StackedArray, old: StackedArray, inside: Collection[int]) -> bool:
        """Whether a compiler writes the rows of a new array into the old one without a copy."""
        if old in self._results:
            return False
        before = self._before(new.owner, inside)
        for step in self._reading(old):
            if step == ("loop", self._loop):
                return False
            if step in self._after and not (step[0] == "batch" and step[1] in before):
                return False
            if step[0] == "batch" and step[1] in inside and step[1] not in before:
                return False
        again = [operand for equation in self._plan.repeated for operand in equation.operands]
        return not any(isinstance(value, tuple) and value[0] in old.index for value in again)

    def _without_late(self, inside: list[int], gradient: StackedArray) -> list[int]:
        """The batches without those that can run after the loop, on arrays that exist anyway."""
        replaced = self.replaced(inside)
        remaining: set[int] = set()
        while True:
            late: set[int] = set()
            for index in inside:
                outputs = [
                    array for array in _arrays(self._side.batches[index]) if array.owner in inside
                ]
                outputs = [
                    value
                    for value in outputs
                    if value.origin == "batched" and value not in replaced
                ]
                reads = _arrays(self._side.batches[index])
                if index not in remaining and gradient not in reads:
                    if all(value.owner in late for value in outputs):
                        late.add(index)
            left = {*inside} - late
            needed = {
                index
                for index in late
                for value in self._side.batches[index].results
                if self._readers(value) & left
            }
            if not needed:
                return [index for index in inside if index in left]
            remaining |= needed

    def _with_makers(self, inside: list[int]) -> list[int]:
        """The batches with those whose results only they read, which then need no array."""
        result = dict.fromkeys(inside)
        for index in reversed(range(len(self._side.batches))):
            batch = self._side.batches[index]
            if (
                index not in result
                and not batch.sliced
                and len(batch.equations) == self._plan.block.count
                and all(self._readers(value) <= result.keys() for value in batch.results)
                and any(map(self._readers, batch.results))
                and all(map(self._is_independent, batch.operands))
                and any(array.origin == "input" for array in _arrays(batch))
            ):
                result = {index: None, **result}
        return list(result)

    def _readers(self, array: StackedArray) -> set[int]:
        """The batched equations that read an array; -1 for any other reader, except the loop."""
        steps = self._reading(array) - {("loop", self._loop)}
        readers = {step[1] if step[0] == "batch" else -1 for step in steps}
        return readers | {-1} if not self._program_results.isdisjoint(array.members) else readers

    def _inside(self, gradient: StackedArray) -> list[int]:
        """All batched equations that depend only on a gradient and on values before the loop."""
        inside: dict[int, None] = {}
        before = -1
        while len(inside) > before:
            before = len(inside)
            for index, batch in enumerate(self._side.batches):
                if index not in inside and self._fits(batch, gradient, inside):
                    inside[index] = None
        return list(inside)

    def _fits(
        self, batch: BatchedEquation, gradient: StackedArray, inside: Mapping[int, None]
    ) -> bool:
        first = self._flow.equations[batch.equations[0]]
        if batch.sliced or first.effects or first.primitive.name == "sharding_constraint":
            return False
        outputs = [
            operand is gradient
            or (
                isinstance(operand, StackedArray)
                and operand.origin == "batched"
                and operand.owner in inside
            )
            for operand in batch.operands
        ]
        return any(outputs) and all(
            output or self._is_independent(operand)
            for output, operand in zip(outputs, batch.operands, strict=True)
        )

    def _is_independent(self, operand: int | StackedArray) -> bool:
        """Whether an operand is computed before the loop."""
        values = operand.members if isinstance(operand, StackedArray) else (operand,)
        makers = [self._flow.producers[value] for value in values if value >= 0]
        steps = {self._step(time) for time in makers if time >= 0}
        return steps.isdisjoint(self._after) and ("loop", self._loop) not in steps

    def _before(self, batch: int, inside: Collection[int]) -> set[int]:
        """A batched equation and those in the loop that it depends on."""
        result, pending = {batch}, [batch]
        while pending:
            for array in _arrays(self._side.batches[pending.pop()]):
                if (
                    array.origin == "batched"
                    and array.owner in inside
                    and array.owner not in result
                ):
                    result.add(array.owner)
                    pending.append(array.owner)
        return result


def _arrays(batch: BatchedEquation) -> list[StackedArray]:
    return [operand for operand in batch.operands if isinstance(operand, StackedArray)]
