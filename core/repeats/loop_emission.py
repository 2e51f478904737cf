"""A rolled program, traced by running its steps on tracers.

Equations are evaluated as they are, so they keep their source lines and their names; loops are
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
    """The state of a rolled program while it is traced.

    Args:
        flow: of the program.
        plans: its loops.
        batches: its batched equations.
        stacks: all arrays.
        required: arrays that loops must output.
        inputs: the program's inputs: values, or arrays of them.
        shardings: of each value; None leaves it to the partitioner.
        updates: batched equations that run in a loop, by the loop's index.
    """

    def __init__(
        self,
        flow: EquationFlow,
        plans: Sequence[LoopPlan],
        batches: Sequence[BatchedEquation],
        stacks: StackedValues,
        required: set[StackedArray],
        inputs: Sequence[tuple[int | StackedArray, Any]],
        shardings: Sequence[NamedSharding | None],
        updates: Mapping[int, LoopUpdates],
    ) -> None:
        """Start without values except inputs and constants."""
        self._flow = flow
        self._plans = plans
        self._batches = batches
        self._stacks = stacks
        self._required = required
        self._shardings = shardings
        self._updates = updates
        consts = range(flow.inputs, flow.inputs + len(flow.program.consts))
        self._values: dict[int, Any] = dict(zip(consts, flow.program.consts, strict=True))
        self._arrays: dict[StackedArray, Any] = {}
        for input_, value in inputs:
            if isinstance(input_, StackedArray):
                self._arrays[input_] = value
            else:
                self._values[input_] = value

    def run(self, steps: Sequence[Step]) -> None:
        """Run the steps."""
        single: list[int] = []
        for kind, index in steps:
            if kind == "equation":
                single.append(index)
                continue
            self._equations(single)
            single = []
            if kind == "loop":
                self._loop(self._plans[index], index)
            else:
                self._batch(index)
        self._equations(single)

    def value(self, operand: int) -> Any:
        """The array of a value or literal."""
        if operand < 0:
            return jnp.asarray(self._flow.literal(operand))
        if operand not in self._values:
            stack = next(
                array for array in self._stacks.containing(operand) if self._is_available(array)
            )
            row = jax.lax.index_in_dim(self.array(stack), stack.index[operand], keepdims=False)
            self._values[operand] = row
        return self._values[operand]

    def array(self, array: StackedArray) -> Any:
        """The values of an array.

        Args:
            array: an input, or one that a step before has produced.
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

    def _is_available(self, array: StackedArray) -> bool:
        return array in self._arrays or array.origin == "sliced"

    def _slices(self, array: StackedArray) -> Any:
        """Slices of a value at different positions, by one gather."""
        times = [self._flow.producers[member] for member in array.members]
        source = self.value(self._flow.operands[times[0]][0])
        params = [self._flow.equations[time].params for time in times]
        sizes = self._flow.avals[array.members[0]].shape
        if params[0]["strides"] is not None and set(params[0]["strides"]) != {1}:
            strides = params[0]["strides"]
            rows = [
                jax.lax.slice(source, param["start_indices"], param["limit_indices"], strides)
                for param in params
            ]
            return jnp.stack(rows)
        begins = jnp.asarray(np.array([param["start_indices"] for param in params], np.int32))
        return jax.vmap(lambda begin: jax.lax.dynamic_slice(source, begin, sizes))(begins)

    def _equations(self, times: Sequence[int]) -> None:
        """Evaluate equations one after the other, as they are."""
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

    def _batch(self, index: int) -> None:
        batch = self._batches[index]
        flow = self._flow
        if batch.sliced:
            for array in batch.results:
                self._arrays[array] = self._slices(array)
            return
        equation = flow.equations[batch.equations[0]]
        literals = {
            position: equation.invars[position]
            for position, operand in enumerate(batch.operands)
            if isinstance(operand, int) and operand < 0
        }
        variables = [
            None if position in literals else Var(atom.aval)
            for position, atom in enumerate(equation.invars)
        ]
        atoms = [literals.get(position, variable) for position, variable in enumerate(variables)]
        args = [
            self.array(operand) if isinstance(operand, StackedArray) else self.value(operand)
            for position, operand in enumerate(batch.operands)
            if position not in literals
        ]
        axes = [
            0 if isinstance(operand, StackedArray) else None
            for position, operand in enumerate(batch.operands)
            if position not in literals
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

    def _loop(self, plan: LoopPlan, loop: int) -> None:
        block = plan.block
        body = _LoopBody(self._flow, plan)
        stacked = [
            array
            for array in sorted(self._required, key=lambda array: (array.origin, array.slot))
            if array.owner == loop and array.origin in ("output", "carried")
        ]
        update = RowUpdates(
            self._flow,
            loop,
            self._batches,
            self._updates.get(loop, LoopUpdates()),
            self._required,
        )
        run = body.function([*stacked, *update.loop_arrays])
        xs, fixed, rows = [], [], []
        for array, where in body.reads:
            if where is None:
                xs.append(self.array(array))
            else:
                fixed.append(self.array(array))
                rows.append(jnp.asarray(np.array(where, np.int32)))
        unsliced = [where is None for _, where in body.reads]
        unchanging = [self.value(value) for value in body.unchanging]
        values = {value: self.value(value) for value in update.values}
        slots = len(block.carried)
        # A value sharded otherwise before the loop than in it is left to the partitioner.
        carried_shardings = [
            self._sharding((first, *block.values_of(block.output_count + output)))
            for output, first in block.carried
        ]
        end_shardings = [
            *carried_shardings,
            *[self._sharding(array.members) for array in (*stacked, *update.loop_arrays)],
        ]

        def iteration(carry: Any, step: Any) -> tuple[Any, Any]:
            (begins, stacks), (elements, indices, read, index) = carry, step
            elements = iter(elements)
            indices = iter(zip(fixed, indices, strict=True))
            taken = [
                next(elements)
                if is_element
                else (lambda pair: jax.lax.dynamic_index_in_dim(*pair, keepdims=False))(
                    next(indices)
                )
                for is_element in unsliced
            ]
            begins = map(_constrain, begins, carried_shardings)
            outputs = list(map(_constrain, run(*begins, *taken, *unchanging), end_shardings))
            ended, args = outputs[:slots], outputs[slots : slots + len(stacked)]
            existing = dict(zip(update.loop_arrays, outputs[slots + len(stacked) :], strict=True))
            existing.update(zip(update.read, read, strict=True))
            stacks, others = update.run(existing, values, stacks, index)
            return (tuple(map(strong, ended)), stacks), (args, others)

        first = tuple([strong(self.value(value)) for _, value in block.carried])
        begin = first, [strong(self.array(stack)) for stack in update.stacks]
        index = jnp.arange(block.count, dtype=np.int32) if update.stacks else None
        steps = xs, rows, [self.array(array) for array in update.read], index
        with jax.named_scope(f"repeat_{loop}"):
            (last, stacks), (outputs, others) = jax.lax.scan(
                iteration, begin, steps, length=block.count, reverse=plan.reverse
            )
        self._arrays.update(zip((*stacked, *update.new_arrays), (*outputs, *others), strict=True))
        news = self._updates[loop].replaced if loop in self._updates else ()
        self._arrays.update(zip(news, stacks, strict=True))
        for (position, _), value in zip(block.carried, last, strict=True):
            self._values[int(block.firsts[-1]) + block.output_count + position] = value

    def _sharding(self, values: Sequence[int]) -> NamedSharding | None:
        """The common sharding of values; None if they differ."""
        shardings = [self._shardings[value] if value >= 0 else None for value in values]
        return shardings[0] if all(sharding == shardings[0] for sharding in shardings) else None


class _LoopBody:
    """The equations of one iteration as a function."""

    def __init__(self, flow: EquationFlow, plan: LoopPlan) -> None:
        """Create a variable for each operand from outside of an iteration."""
        block = plan.block
        self._flow = flow
        self._block = block
        self._plan = plan
        self._carries = [
            Var(flow.avals[block.values_of(block.output_count + output)[0]])
            for output, _ in block.carried
        ]
        self._read: list[Any] = []
        self._fixed: list[Any] = []
        self.reads: list[tuple[StackedArray, tuple[int, ...] | None]] = []
        self.unchanging: list[int] = []
        self._atoms: dict[int, Any] = {}
        self._variables: dict[tuple[int, ...], Any] = {}
        self._repeated: list[Any] = []
        for variable, positions in zip(self._carries, block.carried.values(), strict=True):
            self._atoms.update(dict.fromkeys(positions, variable))
        self._from_outside()

    def _from_outside(self) -> None:
        for values in self._plan.reads:
            self.reads.append(self._plan.reads[values])
            self._read.append(Var(self._flow.aval(values[0])))
            self._variables[values] = self._read[-1]
        for recomputed in self._plan.repeated:
            equation = self._flow.equations[recomputed.equation]
            outputs = [Var(variable.aval) for variable in equation.outvars]
            atoms = [
                self._atom((operand,) if isinstance(operand, int) else operand)
                for operand in recomputed.operands
            ]
            self._repeated.append(equation.replace(invars=atoms, outvars=outputs))
            self._variables.update(zip(recomputed.results, outputs, strict=True))
        for position, values in self._block.outside.items():
            self._atoms[position] = self._atom(self._plan.in_order(values))
        for equation, array in self._plan.sliced.items():
            self.reads.append((array, None))
            self._read.append(self._flow.equations[self._block.start + equation].outvars[0])

    def _atom(self, values: tuple[int, ...]) -> Any:
        """The variable or literal of the body that has a value for each iteration."""
        if self._flow.same_literals(values):
            return self._flow.literals[-1 - values[0]]
        if len(set(values)) > 1:
            return self._variables[values]
        if values[:1] not in self._variables:
            self.unchanging.append(values[0])
            self._fixed.append(Var(self._flow.avals[values[0]]))
            self._variables[values[:1]] = self._fixed[-1]
        return self._variables[values[:1]]

    def function(self, results: Sequence[StackedArray]) -> Any:
        """A function of carries, elements and invariants that returns carries and results."""
        flow, block = self._flow, self._block
        equations, outputs, position = list(self._repeated), [], 0
        for index in range(block.period):
            equation = flow.equations[block.start + index]
            atoms = []
            for operand in equation.invars:
                atoms.append(self._atoms.get(position, operand))
                position += 1
            outputs += equation.outvars
            if index not in self._plan.sliced:
                equations.append(equation.replace(invars=atoms))
        ends = [outputs[block.output_count + output] for output, _ in block.carried]
        ends += [
            outputs[array.slot] if array.origin == "output" else self._carries[array.slot]
            for array in results
        ]
        run = needed(equations, ends)
        return function_of([*self._carries, *self._read, *self._fixed], ends, run)


def _constrain(value: Any, sharding: NamedSharding | None) -> Any:
    return value if sharding is None else jax.lax.with_sharding_constraint(value, sharding)


def _constrained(value: Any, equation: Any) -> Any:
    """An equation's sharding constraint for each member: the leading axis is unsharded."""
    sharding = stacked_sharding(equation.params["sharding"])
    return jax.lax.with_sharding_constraint(value, sharding)
