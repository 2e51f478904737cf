"""Equal equations of all members of a stack, batched into one equation.

An optimizer applies the same equations to the parameter of each layer. If parameters, gradients and
moments are stacks, so are the values computed from them: each equation is one over arrays with a
leading axis, and elementwise chains remain chains that the compiler can fuse. The search goes from
the stacks that loops read or output to the equations that read them, and on to their operands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable

from isoshard.core.repeats.equation_flow import EquationFlow
from isoshard.core.repeats.loop_extents import small
from isoshard.core.repeats.loop_plans import stackable
from isoshard.core.repeats.stacked_values import StackedArray, StackedValues

_DEEP = 200
"""How far back the producers of an equation's operands are followed."""


@dataclasses.dataclass(frozen=True, eq=False)
class BatchedEquation:
    """Equal equations, one for each member of a stack.

    Attributes:
        equations: in the order of the leading axis.
        operands: an array, or a value that is the same for all.
        results: an array for each result.
        sliced: the equations are slices of one value at different positions.
    """

    equations: tuple[int, ...]
    operands: tuple[int | StackedArray, ...]
    results: tuple[StackedArray, ...]
    sliced: bool = False


class SideBySide:
    """Equations of a program that are batched.

    Args:
        flow: of the program.
        keys: of its equations.
        stacks: the arrays so far; those of batched equations are added.
        taken: equations that are in loops.
        label: of an input; only inputs with equal labels are stacked.
        excluded: equations that are not batched.

    Attributes:
        batches: the batched equations.
        batched_in: the index of the batch of each batched equation.
    """

    def __init__(
        self,
        flow: EquationFlow,
        keys: list[int],
        stacks: StackedValues,
        taken: Iterable[int],
        label: Callable[[int], Hashable],
        excluded: frozenset[int],
    ) -> None:
        """Start without batches."""
        self._flow = flow
        self._keys = keys
        self._stacks = stacks
        self._label = label
        self._excluded = excluded
        self._taken = set(taken)
        self._alone = {time for time, equation in enumerate(flow.equations) if equation.effects}
        self._failed: set[tuple[int, ...]] = set()
        self._new: list[tuple[int, ...]] = []
        self.batches: list[BatchedEquation] = []
        self.batched_in: dict[int, int] = {}

    def follow(self, families: Iterable[tuple[int, ...]]) -> None:
        """Batch the equations that read the members of arrays, their readers, and so on."""
        pending = list(families)
        before = -1
        while len(self.batches) > before:
            before = len(self.batches)
            self._failed.clear()
            for family in pending:
                if min(family) >= 0:
                    self._readers(family)
            while self._new:
                family = self._new.pop()
                pending.append(family)
                self._readers(family)

    def batch(self, equations: tuple[int, ...], deep: int = 0) -> bool:
        """Batch equal equations if their operands are in arrays."""
        if equations[0] in self.batched_in:
            batch = self.batched_in[equations[0]]
            return self.batches[batch].equations == equations
        if not self._free(equations) or equations in self._failed or deep > _DEEP:
            return False
        self._failed.add(equations)
        columns = list(zip(*[self._flow.operands[equation] for equation in equations], strict=True))
        operands = []
        for column in columns:
            operand = self._operand(column, deep)
            if operand is None:
                return False
            operands.append(operand)
        sliced = False
        if all(isinstance(operand, int) for operand in operands):
            first = self._flow.equations[equations[0]]
            if first.primitive.name != "slice":
                return False
            sliced = True
        elif self._flow.equations[equations[0]].primitive.name == "slice":
            params = [
                self._flow.equations[equation].params["start_indices"] for equation in equations
            ]
            if len(set(params)) > 1:
                return False
        if not self._free(equations):
            return False
        batch = len(self.batches)
        self.batched_in.update(dict.fromkeys(equations, batch))
        results = []
        for result in range(len(self._flow.outputs[equations[0]])):
            members = tuple([self._flow.outputs[equation][result] for equation in equations])
            results.append(self._stacks.add(StackedArray(members, "batched", batch, result)))
            self._new.append(members)
        self.batches.append(BatchedEquation(equations, tuple(operands), tuple(results), sliced))
        return True

    def _free(self, equations: tuple[int, ...]) -> bool:
        return (
            len(set(equations)) == len(equations)
            and len({self._keys[equation] for equation in equations}) == 1
            and self._excluded.isdisjoint(equations)
            and self._taken.isdisjoint(equations)
            and self._alone.isdisjoint(equations)
            and not any(equation in self.batched_in for equation in equations)
        )

    def _operand(self, column: tuple[int, ...], deep: int) -> int | StackedArray | None:
        first = column[0]
        if all(value == first for value in column):
            return first
        if max(column) < 0:
            if self._flow.same_literals(column):
                return first
            return self._stacks.add(StackedArray(column, "literals"))
        existing = self._stacks.exactly(column)
        if existing is not None:
            return existing
        if min(column) < 0:
            return None
        if stackable(self._flow, column, self._stacks, self._label):
            return self._stacks.add(StackedArray(column, "input"))
        makers = tuple([self._flow.producers[value] for value in column])
        if min(makers) >= 0:
            results = {
                self._flow.outputs[maker].index(value)
                for maker, value in zip(makers, column, strict=True)
            }
            if len(results) == 1 and self.batch(makers, deep + 1):
                return self._stacks.exactly(column)
        if small(self._flow.aval(first)) and len(set(column)) == len(column):
            return self._stacks.add(StackedArray(column, "gathered"))
        return None

    def _readers(self, family: tuple[int, ...]) -> None:
        """Batch the equations that read each member in the same way."""
        groups = [self._reads(value) for value in family]
        for read, first in groups[0].items():
            others = [group.get(read, ()) for group in groups]
            if all(len(other) == len(first) for other in others):
                for equations in zip(*others, strict=True):
                    self.batch(equations)

    def _reads(self, value: int) -> dict[tuple[int, int], list[int]]:
        """Equations that read a value and are not in a loop, by key and operand."""
        reads: dict[tuple[int, int], list[int]] = {}
        for time in self._flow.readers[value]:
            if time not in self._taken and time not in self._alone:
                position = self._flow.operands[time].index(value)
                reads.setdefault((self._keys[time], position), []).append(time)
        return reads
