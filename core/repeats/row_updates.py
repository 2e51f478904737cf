"""Batched equations that a loop runs, a row in each iteration.

A row keeps its leading axis, of size 1: XLA's CPU compiler then reads, computes and writes it in
one pass over the stack, and copies it first otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from isoshard.core.repeats.equation_flow import EquationFlow
from isoshard.core.repeats.jaxpr_functions import function_of, over_rows
from isoshard.core.repeats.side_by_side import BatchedEquation
from isoshard.core.repeats.stacked_values import StackedArray
from isoshard.core.repeats.updates_in_loops import LoopUpdates
from isoshard.core.runtime._jax_internals.jaxpr_classes import Var


class RowUpdates:
    """The arrays that the updates in a loop read, replace and output.

    Args:
        flow: of the program.
        loop: its index.
        batches: all batched equations.
        updates: those in the loop.
        required: arrays that other steps read.

    Attributes:
        loop_arrays: arrays of the loop of which a row is needed.
        read: arrays from before the loop, likewise.
        values: loop-invariant values.
        stacks: arrays of which rows are replaced.
        new_arrays: results in arrays of their own.
    """

    def __init__(
        self,
        flow: EquationFlow,
        loop: int,
        batches: Sequence[BatchedEquation],
        updates: LoopUpdates,
        required: Collection[StackedArray],
    ) -> None:
        """Classify the operands of the updates."""
        self._flow = flow
        self._batches = [batches[batch] for batch in updates.batches]
        self._replaced = updates.replaced
        outputs = {value for batch in self._batches for value in batch.results}
        read = dict.fromkeys(operand for batch in self._batches for operand in batch.operands)
        arrays = [
            value for value in read if isinstance(value, StackedArray) and value not in outputs
        ]
        self.values = [value for value in read if isinstance(value, int) and value >= 0]
        self.stacks = list(updates.replaced.values())
        self.loop_arrays = [
            array for array in arrays if array.origin == "output" and array.owner == loop
        ]
        self.read = [
            array for array in arrays if array not in self.loop_arrays and array not in self.stacks
        ]
        self.new_arrays = [
            value
            for batch in self._batches
            for value in batch.results
            if value in required and value not in updates.replaced
        ]

    def run(
        self,
        rows: Mapping[StackedArray, Any],
        values: Mapping[int, Any],
        stacks: Sequence[Any],
        index: Any,
    ) -> tuple[list[Any], list[Any]]:
        """One iteration.

        Args:
            rows: of `loop_arrays` and `read`.
            values: of `values`.
            stacks: of `stacks`.
            index: of the row.

        Returns:
            The stacks with new rows, and rows of `new_arrays`.
        """
        rows = {value: jnp.expand_dims(row, 0) for value, row in rows.items()}
        now = dict(zip(self.stacks, stacks, strict=True))
        rows.update((stack, _row(now[stack], index)) for stack in self.stacks)
        for batch in self._batches:
            outputs = self._evaluated(batch, rows, values)
            for result, row in zip(batch.results, outputs, strict=True):
                old = self._replaced.get(result)
                rows[result] = row
                if old is not None:  # later equations read the new array, so XLA needs no copy
                    now[old] = jax.lax.dynamic_update_slice_in_dim(now[old], row, index, 0)
                    rows[result] = _row(now[old], index)
        return [now[stack] for stack in self.stacks], [rows[stack][0] for stack in self.new_arrays]

    def _evaluated(
        self, batch: BatchedEquation, rows: Mapping[StackedArray, Any], values: Mapping[int, Any]
    ) -> list[Any]:
        equation = self._flow.equations[batch.equations[0]]
        atoms, variables, args, axes = [], [], [], []
        for operand, atom in zip(batch.operands, equation.invars, strict=True):
            if isinstance(operand, int) and operand < 0:
                atoms.append(atom)
                continue
            variables.append(Var(atom.aval))
            atoms.append(variables[-1])
            args.append(values[operand] if isinstance(operand, int) else rows[operand])
            axes.append(None if isinstance(operand, int) else 0)
        run = function_of(variables, equation.outvars, [equation.replace(invars=atoms)])
        return over_rows(run, axes, args, 1)


def _row(array: Any, index: Any) -> Any:
    return jax.lax.dynamic_slice_in_dim(array, index, 1)
