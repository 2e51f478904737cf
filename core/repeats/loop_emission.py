"""A rolled program written by running its steps on tracers.

Equations are evaluated as they are, so they keep their lines of source and their names; loops are
`jax.lax.scan`s of the equations of one iteration, batched equations are under `jax.vmap`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from isoshard.core.layout.spec import stacked_sharding
from isoshard.core.repeats.equation_flow import EquationFlow
from isoshard.core.repeats.equation_order import Step
from isoshard.core.repeats.jaxpr_functions import function_of, over_rows, strong
from isoshard.core.repeats.loop_plans import LoopPlan
from isoshard.core.repeats.row_updates import RowUpdates
from isoshard.core.repeats.side_by_side import BatchedEquation
from isoshard.core.repeats.stacked_values import StackedArray, StackedValues
from isoshard.core.repeats.updates_in_loops import LoopUpdates
from isoshard.core.runtime._jax_internals.jaxpr_classes import Var
from isoshard.core.runtime.jaxprs import needed


class LoopEmission:
    """What is known while a rolled program runs on tracers.

    Args:
        flow: of the program.
        plans: its loops.
        batches: its batched equations.
        stacks: all arrays.
        wanted: arrays that loops are to give.
        inputs: the program's inputs: values, or arrays of them.
        lies: of each value how it is laid out; None leaves it open.
        updates: batched equations that run in a loop, by its number.
    """

    def __init__(
        self,
        flow: EquationFlow,
        plans: Sequence[LoopPlan],
        batches: Sequence[BatchedEquation],
        stacks: StackedValues,
        wanted: set[StackedArray],
        inputs: Sequence[tuple[int | StackedArray, Any]],
        lies: Sequence[NamedSharding | None],
        updates: Mapping[int, LoopUpdates],
    ) -> None:
        """Nothing has run at first."""
        self._flow = flow
        self._plans = plans
        self._batches = batches
        self._stacks = stacks
        self._wanted = wanted
        self._lies = lies
        self._updates = updates
        consts = range(flow.inputs, flow.inputs + len(flow.program.consts))
        self._values: dict[int, Any] = dict(zip(consts, flow.program.consts, strict=True))
        self._arrays: dict[StackedArray, Any] = {}
        for one, value in inputs:
            if isinstance(one, StackedArray):
                self._arrays[one] = value
            else:
                self._values[one] = value

    def run(self, steps: Sequence[Step]) -> None:
        """Run the steps."""
        single: list[int] = []
        for kind, number in steps:
            if kind == "equation":
                single.append(number)
                continue
            self._equations(single)
            single = []
            if kind == "loop":
                self._loop(self._plans[number], number)
            else:
                self._batch(number)
        self._equations(single)

    def value(self, operand: int) -> Any:
        """One value or literal."""
        if operand < 0:
            return jnp.asarray(self._flow.literal(operand))
        if operand not in self._values:
            array = next(one for one in self._stacks.homes(operand) if self._known(one))
            row = jax.lax.index_in_dim(self.array(array), array.index[operand], keepdims=False)
            self._values[operand] = row
        return self._values[operand]

    def array(self, array: StackedArray) -> Any:
        """The values of an array.

        Args:
            array: one that is an input, or whose maker has run.
        """
        if array not in self._arrays:
            if array.origin == "literals":
                values = [self._flow.literal(member) for member in array.members]
                self._arrays[array] = jnp.asarray(np.stack(values))
            elif array.origin == "gathered":
                rows = [jnp.expand_dims(self.value(member), 0) for member in array.members]
                self._arrays[array] = jax.lax.concatenate(rows, 0)
            else:
                self._arrays[array] = self._slices(array)
        return self._arrays[array]

    def _known(self, array: StackedArray) -> bool:
        return array in self._arrays or array.origin == "sliced"

    def _slices(self, array: StackedArray) -> Any:
        """Slices of one value at different positions, by one gather."""
        times = [self._flow.made_by[member] for member in array.members]
        whole = self.value(self._flow.operands[times[0]][0])
        params = [self._flow.equations[time].params for time in times]
        sizes = self._flow.avals[array.members[0]].shape
        if params[0]["strides"] is not None and set(params[0]["strides"]) != {1}:
            strides = params[0]["strides"]
            rows = [
                jax.lax.slice(whole, param["start_indices"], param["limit_indices"], strides)
                for param in params
            ]
            return jnp.stack(rows)
        begins = jnp.asarray(np.array([param["start_indices"] for param in params], np.int32))
        return jax.vmap(lambda begin: jax.lax.dynamic_slice(whole, begin, sizes))(begins)

    def _equations(self, times: Sequence[int]) -> None:
        """Equations one after the other, as they are."""
        if not times:
            return
        flow = self._flow
        atoms: dict[int, Any] = {}
        variables: dict[int, Any] = {}
        results: dict[int, Any] = {}
        equations = []
        for time in times:
            equation = flow.equations[time]
            read = []
            for operand, atom in zip(flow.operands[time], equation.invars, strict=True):
                if operand >= 0 and operand not in atoms:
                    atoms[operand] = variables[operand] = Var(flow.avals[operand])
                read.append(atoms[operand] if operand >= 0 else atom)
            equations.append(equation.replace(invars=read))
            outputs = dict(zip(flow.outputs[time], equation.outvars, strict=True))
            atoms.update(outputs)
            results.update(outputs)
        run = function_of(list(variables.values()), list(results.values()), equations)
        values = run(*[self.value(variable) for variable in variables])
        self._values.update(zip(results, values, strict=True))

    def _batch(self, number: int) -> None:
        batch = self._batches[number]
        flow = self._flow
        if batch.sliced:
            for array in batch.results:
                self._arrays[array] = self._slices(array)
            return
        equation = flow.equations[batch.equations[0]]
        literals = {
            place: equation.invars[place]
            for place, operand in enumerate(batch.operands)
            if isinstance(operand, int) and operand < 0
        }
        variables = [
            None if place in literals else Var(atom.aval)
            for place, atom in enumerate(equation.invars)
        ]
        atoms = [literals.get(place, variable) for place, variable in enumerate(variables)]
        args = [
            self.array(operand) if isinstance(operand, StackedArray) else self.value(operand)
            for place, operand in enumerate(batch.operands)
            if place not in literals
        ]
        axes = [
            0 if isinstance(operand, StackedArray) else None
            for place, operand in enumerate(batch.operands)
            if place not in literals
        ]
        named = isinstance(equation.params.get("sharding"), NamedSharding)
        if equation.primitive.name == "sharding_constraint" and named:
            values = [_constrained(args[0], equation)]
        else:
            run = function_of(
                [variable for variable in variables if variable is not None],
                equation.outvars,
                [equation.replace(invars=atoms)],
            )
            values = over_rows(run, axes, args, len(batch.equations))
        self._arrays.update(zip(batch.results, values, strict=True))

    def _loop(self, plan: LoopPlan, number: int) -> None:
        block = plan.block
        body = _LoopBody(self._flow, plan)
        stacked = [
            one
            for one in sorted(self._wanted, key=lambda one: (one.origin, one.number))
            if one.owner == number and one.origin in ("made", "carried")
        ]
        update = RowUpdates(
            self._flow,
            number,
            self._batches,
            self._updates.get(number, LoopUpdates()),
            self._wanted,
        )
        run = body.function([*stacked, *update.made])
        xs, fixed, rows = [], [], []
        for array, where in body.reads:
            if where is None:
                xs.append(self.array(array))
            else:
                fixed.append(self.array(array))
                rows.append(jnp.asarray(np.array(where, np.int32)))
        unsliced = [where is None for _, where in body.reads]
        unchanging = [self.value(one) for one in body.unchanging]
        values = {one: self.value(one) for one in update.values}
        slots = len(block.carried)
        # A value that lies otherwise before the loop than in it is left to the partitioner.
        carried = [
            self._layout((first, *block.made_as(block.made + one))) for one, first in block.carried
        ]
        ends = [*carried, *[self._layout(one.members) for one in (*stacked, *update.made)]]

        def iteration(carry: Any, step: Any) -> tuple[Any, Any]:
            (begins, stacks), (elements, indices, read, index) = carry, step
            elements = iter(elements)
            indices = iter(zip(fixed, indices, strict=True))
            taken = [
                next(elements)
                if one
                else (lambda pair: jax.lax.dynamic_index_in_dim(*pair, keepdims=False))(
                    next(indices)
                )
                for one in unsliced
            ]
            begins = map(_laid_out, begins, carried)
            outputs = list(map(_laid_out, run(*begins, *taken, *unchanging), ends))
            ended, args = outputs[:slots], outputs[slots : slots + len(stacked)]
            existing = dict(zip(update.made, outputs[slots + len(stacked) :], strict=True))
            existing.update(zip(update.read, read, strict=True))
            stacks, others = update.run(existing, values, stacks, index)
            return (tuple(map(strong, ended)), stacks), (args, others)

        first = tuple([strong(self.value(value)) for _, value in block.carried])
        begin = first, [strong(self.array(stack)) for stack in update.stacks]
        index = jnp.arange(block.count, dtype=np.int32) if update.stacks else None
        steps = xs, rows, [self.array(one) for one in update.read], index
        with jax.named_scope(f"repeat_{number}"):
            (last, stacks), (outputs, others) = jax.lax.scan(
                iteration, begin, steps, length=block.count, reverse=plan.reverse
            )
        self._arrays.update(zip((*stacked, *update.given), (*outputs, *others), strict=True))
        news = self._updates[number].replaced if number in self._updates else ()
        self._arrays.update(zip(news, stacks, strict=True))
        for (position, _), value in zip(block.carried, last, strict=True):
            self._values[int(block.firsts[-1]) + block.made + position] = value

    def _layout(self, values: Sequence[int]) -> NamedSharding | None:
        """The layout of values that have the same one."""
        layouts = [self._lies[one] if one >= 0 else None for one in values]
        return layouts[0] if all(layout == layouts[0] for layout in layouts) else None


class _LoopBody:
    """The equations of one iteration as a function."""

    def __init__(self, flow: EquationFlow, plan: LoopPlan) -> None:
        """Say for each operand which variable it is."""
        block = plan.block
        self._flow = flow
        self._block = block
        self._plan = plan
        self._carries = [
            Var(flow.avals[block.made_as(block.made + carried)[0]]) for carried, _ in block.carried
        ]
        self._read: list[Any] = []
        self._fixed: list[Any] = []
        self.reads: list[tuple[StackedArray, tuple[int, ...] | None]] = []
        self.unchanging: list[int] = []
        self._atoms: dict[int, Any] = {}
        self._known: dict[tuple[int, ...], Any] = {}
        self._repeated: list[Any] = []
        for variable, positions in zip(self._carries, block.carried.values(), strict=True):
            self._atoms.update(dict.fromkeys(positions, variable))
        self._from_outside()

    def _from_outside(self) -> None:
        for values in self._plan.reads:
            self.reads.append(self._plan.reads[values])
            self._read.append(Var(self._flow.aval(values[0])))
            self._known[values] = self._read[-1]
        for one in self._plan.repeated:
            equation = self._flow.equations[one.equation]
            outputs = [Var(variable.aval) for variable in equation.outvars]
            atoms = [
                self._atom((operand,) if isinstance(operand, int) else operand)
                for operand in one.operands
            ]
            self._repeated.append(equation.replace(invars=atoms, outvars=outputs))
            self._known.update(zip(one.results, outputs, strict=True))
        for position, values in self._block.outside.items():
            self._atoms[position] = self._atom(self._plan.in_order(values))
        for equation, array in self._plan.sliced.items():
            self.reads.append((array, None))
            self._read.append(self._flow.equations[self._block.start + equation].outvars[0])

    def _atom(self, values: tuple[int, ...]) -> Any:
        """What stands for the values of all iterations in the body."""
        if self._flow.same_literals(values):
            return self._flow.literals[-1 - values[0]]
        if len(set(values)) > 1:
            return self._known[values]
        if values[:1] not in self._known:
            self.unchanging.append(values[0])
            self._fixed.append(Var(self._flow.avals[values[0]]))
            self._known[values[:1]] = self._fixed[-1]
        return self._known[values[:1]]

    def function(self, results: Sequence[StackedArray]) -> Any:
        """From carries, elements and what does not change to new carries and results."""
        flow, block = self._flow, self._block
        equations, outputs, position = list(self._repeated), [], 0
        for number in range(block.period):
            equation = flow.equations[block.start + number]
            atoms = []
            for operand in equation.invars:
                atoms.append(self._atoms.get(position, operand))
                position += 1
            outputs += equation.outvars
            if number not in self._plan.sliced:
                equations.append(equation.replace(invars=atoms))
        ends = [outputs[block.made + carried] for carried, _ in block.carried]
        ends += [
            outputs[one.number] if one.origin == "made" else self._carries[one.number]
            for one in results
        ]
        run = needed(equations, ends)
        return function_of([*self._carries, *self._read, *self._fixed], ends, run)


def _laid_out(value: Any, layout: NamedSharding | None) -> Any:
    return value if layout is None else jax.lax.with_sharding_constraint(value, layout)


def _constrained(value: Any, equation: Any) -> Any:
    """A layout for each member: the leading axis is not split."""
    layout = stacked_sharding(equation.params["sharding"])
    return jax.lax.with_sharding_constraint(value, layout)
