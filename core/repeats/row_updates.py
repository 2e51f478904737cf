"""The part of a loop that runs batched equations, a row in each iteration.

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
    """What the updates in one loop read, replace and give.

    Args:
        flow: of the program.
        loop: its number.
        batches: all batched equations.
        updates: those in the loop.
        wanted: arrays that others read.

    Attributes:
        made: arrays of the loop of which a row is needed.
        read: arrays from before the loop, likewise.
        values: what is the same in all iterations.
        stacks: arrays of which rows are replaced.
        given: results in arrays of their own.
    """

    def __init__(
        self,
        flow: EquationFlow,
        loop: int,
        batches: Sequence[BatchedEquation],
        updates: LoopUpdates,
        wanted: Collection[StackedArray],
    ) -> None:
        """Look at what they read."""
        self._flow = flow
        self._batches = [batches[number] for number in updates.batches]
        self._replaced = updates.replaced
        made = {one for batch in self._batches for one in batch.results}
        read = dict.fromkeys(one for batch in self._batches for one in batch.operands)
        arrays = [one for one in read if isinstance(one, StackedArray) and one not in made]
        self.values = [one for one in read if isinstance(one, int) and one >= 0]
        self.stacks = list(updates.replaced.values())
        self.made = [one for one in arrays if one.origin == "made" and one.owner == loop]
        self.read = [one for one in arrays if one not in self.made and one not in self.stacks]
        self.given = [
            one
            for batch in self._batches
            for one in batch.results
            if one in wanted and one not in updates.replaced
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
            rows: of `made` and `read`.
            values: of `values`.
            stacks: of `stacks`.
            index: of the row.

        Returns:
            The stacks with new rows, and rows of `given`.
        """
        rows = {one: jnp.expand_dims(row, 0) for one, row in rows.items()}
        now = dict(zip(self.stacks, stacks, strict=True))
        rows.update((one, _row(now[one], index)) for one in self.stacks)
        for batch in self._batches:
            made = self._evaluated(batch, rows, values)
            for result, row in zip(batch.results, made, strict=True):
                old = self._replaced.get(result)
                rows[result] = row
                if old is not None:  # what follows reads the new array: then no copy is needed
                    now[old] = jax.lax.dynamic_update_slice_in_dim(now[old], row, index, 0)
                    rows[result] = _row(now[old], index)
        return [now[one] for one in self.stacks], [rows[one][0] for one in self.given]

    def _evaluated(
        self, batch: BatchedEquation, rows: Mapping[StackedArray, Any], values: Mapping[int, Any]
    ) -> list[Any]:
        equation = self._flow.equations[batch.equations[0]]
        atoms, variables, given, axes = [], [], [], []
        for one, atom in zip(batch.operands, equation.invars, strict=True):
            if isinstance(one, int) and one < 0:
                atoms.append(atom)
                continue
            variables.append(Var(atom.aval))
            atoms.append(variables[-1])
            given.append(values[one] if isinstance(one, int) else rows[one])
            axes.append(None if isinstance(one, int) else 0)
        run = function_of(variables, equation.outvars, [equation.replace(invars=atoms)])
        return over_rows(run, axes, given, 1)


def _row(array: Any, index: Any) -> Any:
    return jax.lax.dynamic_slice_in_dim(array, index, 1)
