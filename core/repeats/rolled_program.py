"""Equal layers of a program as one loop: `rolled`.

A traced step of a deep model repeats each layer's equations, in the forward, the backward and the
optimizer, and compile time grows with each. `rolled` finds equal layers, and traces a program with
one `jax.lax.scan` over layers for the forward and one for the backward, and with one equation over
all layers where no layer depends on another. Inputs of equal role (a parameter of each layer) are
stacked along a new leading axis, and so are results.

>>> import jax, jax.numpy as jnp
>>> def loss(layers, x):
...     for weight in layers:
...         x = jnp.tanh(x @ weight)
...     return jnp.sum(x)
>>> def step(layers, x):
...     return [w - 0.1 * g for w, g in zip(layers, jax.grad(loss)(layers, x))]
>>> layers, x = [jnp.full((4, 4), 0.1 * i) for i in range(6)], jnp.ones((2, 4))
>>> looped = rolled(jax.make_jaxpr(step)(layers, x))
>>> [loop.length for loop in looped.loops]                 # forward and backward
[5, 5]
>>> [stack.indices for stack in looped.inputs]             # the first layer's backward differs
[(0,), (1, 2, 3, 4, 5), (6,)]
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from isoshard.core.layout.spec import stacked_sharding
from isoshard.core.repeats.common_equations import eliminate_common
from isoshard.core.repeats.equation_flow import EquationFlow
from isoshard.core.repeats.equation_keys import equation_keys
from isoshard.core.repeats.equation_order import StepOrder
from isoshard.core.repeats.inlined_calls import inlined
from isoshard.core.repeats.loop_emission import LoopEmission
from isoshard.core.repeats.loop_extents import LoopExtents
from isoshard.core.repeats.loop_plans import LoopPlan, planned, slice_positions
from isoshard.core.repeats.periodic_runs import PeriodicRun, periodic_runs
from isoshard.core.repeats.recomputed_values import recomputed
from isoshard.core.repeats.repeat_borders import first_border
from isoshard.core.repeats.repeated_block import RepeatedBlock, blocks_of
from isoshard.core.repeats.shared_reductions import shared
from isoshard.core.repeats.side_by_side import SideBySide
from isoshard.core.repeats.stacked_values import StackedArray, StackedValues
from isoshard.core.repeats.updates_in_loops import LoopUpdates, updates_in
from isoshard.core.runtime._jax_internals.jaxpr_classes import ClosedJaxpr, Var
from isoshard.core.runtime.jaxprs import opened

_WORTH = 8
"""The fewest equations that a loop must save."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """An input or result of a rolled program.

    Attributes:
        indices: of the inputs (results) of the original program, in the order of the leading axis.
        stacked: False for a single input or result, without a leading axis.
    """

    indices: tuple[int, ...]
    stacked: bool


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of a rolled program.

    Attributes:
        name: the scope of its operations.
        length: iterations.
        equations: of one iteration.
    """

    name: str
    length: int
    equations: int


@dataclasses.dataclass(frozen=True, eq=False)
class Rolled:
    """A program with loops.

    Attributes:
        program: a `jax.extend.core.ClosedJaxpr`.
        inputs: the original inputs in each input; ordered by the first.
        results: likewise of results.
        loops: in order.
        batched: equations over a whole stack.
        reasons: why equal parts are no loop.
    """

    program: ClosedJaxpr
    inputs: tuple[Stack, ...]
    results: tuple[Stack, ...]
    loops: tuple[Loop, ...]
    batched: int
    reasons: tuple[str, ...]


def rolled(
    program: ClosedJaxpr,
    *,
    at_least: int = 3,
    labels: Sequence[Hashable] | None = None,
    replaces: Sequence[int | None] | None = None,
    differentiated: bool = False,
    layouts: Callable[[ClosedJaxpr], Mapping[Var, NamedSharding]] | None = None,
    updates: bool = False,
) -> Rolled:
    """Rewrite equal parts of a program as loops.

    Args:
        program: a traced function, such as a whole training step.
        at_least: how many equal parts become a loop; 2 or more.
        labels: of each input, such as its sharding; only inputs with equal labels are stacked.
        replaces: of each result the index of the input whose new value it is, or None; if such
            inputs are stacked, so are their new values, in the same order.
        differentiated: the program will be differentiated: functions with a custom derivative
            (`jax.custom_vjp`) are equal only if their rules are the same objects.
        layouts: returns shardings of the variables of an equivalent program. Carries and outputs
            of loops are constrained to them, where all iterations and the first value agree.
        updates: large gradients are applied by the optimizer in the loop that computes them.

    Returns:
        The program with loops, if any part repeats.

    Raises:
        ValueError: `at_least` is below 2, or `labels` has not one entry for each input, or
            `replaces` for each result.
    """
    _check(program, at_least, labels, replaces)
    flow = EquationFlow.of(inlined(program))
    shardings_of = {} if layouts is None else layouts(flow.program)
    shardings = (
        [shardings_of.get(variable) for variable in flow.variables()]
        if shardings_of
        else [None] * len(flow.avals)
    )

    def label(index: int) -> Hashable:
        return None if labels is None else labels[index]

    keys = equation_keys(flow, differentiated=differentiated)
    extents, others = _blocks(flow, keys, at_least, label)
    flow, blocks, skipped = eliminate_common(flow, keys.tolist(), extents.blocks)
    rejected: frozenset[int] = frozenset(skipped)
    while True:
        stacks = StackedValues()
        plans = [planned(flow, index, block, stacks, label) for index, block in enumerate(blocks)]
        side = _batched(flow, keys, plans, others, stacks, label, rejected)
        order = StepOrder(flow, blocks, side.batched_in, skipped)
        steps, circle = order.ordered()
        if not circle:
            break
        rejected |= {side.batches[index].equations[0] for index in circle}
    plans = recomputed(flow, shared(flow, keys.tolist(), plans, stacks), stacks)
    inputs = _inputs(flow, stacks)
    results = _results(flow, stacks, inputs, replaces)
    within: dict[int, LoopUpdates] = {}
    result_values = [value for value, _ in results]
    if updates:
        within = updates_in(
            flow, plans, side, result_values, _new_of(inputs, results, replaces), order
        )
        loop_of = {batch: loop for loop, updates in within.items() for batch in updates.batches}
        steps, _ = StepOrder(flow, blocks, side.batched_in, skipped, loop_of).ordered()
    requested = _required_arrays(flow, plans, side, stacks, result_values, skipped, within)

    def run(*args: Any) -> list[Any]:
        emission = LoopEmission(
            flow,
            plans,
            side.batches,
            stacks,
            requested,
            list(zip(inputs, args, strict=True)),
            shardings,
            within,
        )
        emission.run(steps)
        return [
            emission.array(value) if isinstance(value, StackedArray) else emission.value(value)
            for value, _ in results
        ]

    with _types_of(flow):
        traced = jax.make_jaxpr(run)(*[_struct(flow, input_) for input_ in inputs])
    loops = [
        Loop(f"repeat_{index}", plan.block.count, plan.block.period)
        for index, plan in enumerate(plans)
    ]
    return Rolled(
        traced,
        tuple([_stack(input_) for input_ in inputs]),
        tuple([stack for _, stack in results]),
        tuple(loops),
        len(side.batches),
        tuple(extents.reasons),
    )


def _check(
    program: ClosedJaxpr,
    at_least: int,
    labels: Sequence[Hashable] | None,
    replaces: Sequence[int | None] | None,
) -> None:
    if at_least < 2:
        raise ValueError(f"at_least={at_least}: a loop has 2 iterations or more")
    for name, entries, count, kind in (
        ("labels", labels, len(opened(program).invars), "inputs"),
        ("replaces", replaces, len(opened(program).outvars), "results"),
    ):
        if entries is not None and len(entries) != count:
            raise ValueError(
                f"{name} has {len(entries)} entries, and the program {count} {kind}: give one for "
                "each"
            )


def _blocks(
    flow: EquationFlow, keys: Any, at_least: int, label: Callable[[int], Hashable]
) -> tuple[LoopExtents, list[RepeatedBlock]]:
    """Blocks that become loops, and blocks without dependent carries."""
    extents = LoopExtents(flow, at_least, label)
    others = []
    for run in periodic_runs(keys, at_least):
        border = first_border(flow, run, extents.iterations())
        count = (run.length - border) // run.period
        if count < at_least:
            border, count = 0, run.length // run.period
        blocks = blocks_of(flow, run.start + border, run.period, count, at_least)
        if not blocks and run.length - run.period >= _WORTH:
            extents.reasons.append(_mixed_reason(run, count))
        for block in blocks:
            if not block.recurs:
                others.append(block)
            elif _worth_it(block) and _slices_fit(flow, block, extents):
                extents.add(block)
    return extents, others


def _worth_it(block: RepeatedBlock) -> bool:
    """Whether a loop saves enough equations, and its iterations are not all scalar arithmetic."""
    outputs = block.values_of(0)[0]
    shapes = [aval.shape for aval in block.flow.avals[outputs : outputs + block.output_count]]
    return block.saved >= _WORTH and any(shapes)


def _mixed_reason(run: PeriodicRun, count: int) -> str:
    return (
        f"{count} equal parts of {run.period} equations are no loop: each reads other results of "
        "those before it"
    )


def _slices_fit(flow: EquationFlow, block: RepeatedBlock, extents: LoopExtents) -> bool:
    for position, values in block.outside.items():
        equation = flow.equations[block.start + block.equation_of[position]]
        if equation.primitive.name == "slice" and len(set(values)) > 1:
            if len(slice_positions(flow, block, block.equation_of[position])) > 1:
                extents.reasons.append(
                    f"{block.count} equal parts of {block.period} equations are no loop: they "
                    "slice other values at other positions"
                )
                return False
    return True


def _batched(
    flow: EquationFlow,
    keys: Any,
    plans: Sequence[LoopPlan],
    others: Sequence[RepeatedBlock],
    stacks: StackedValues,
    label: Callable[[int], Hashable],
    rejected: frozenset[int],
) -> SideBySide:
    taken = [time for plan in plans for time in range(plan.block.start, plan.block.stop)]
    side = SideBySide(flow, keys.tolist(), stacks, taken, label, rejected)
    families = []
    for plan in plans:
        block = plan.block
        families += list(plan.reads)
        for output in range(block.output_count):
            values = plan.in_order(block.values_of(output))
            if any(not block.start <= time < block.stop for time in flow.readers[values[0]]):
                families.append(values)
    side.follow(families)
    for block in others:
        for position in range(block.period):
            side.batch(tuple(range(block.start + position, block.stop, block.period)))
    side.follow(())
    return side


def _inputs(flow: EquationFlow, stacks: StackedValues) -> list[int | StackedArray]:
    stacked = {value: array for array in stacks.inputs for value in array.members}
    inputs = dict.fromkeys(stacked.get(value, value) for value in range(flow.inputs))
    return list(inputs)


def _results(
    flow: EquationFlow,
    stacks: StackedValues,
    inputs: Sequence[int | StackedArray],
    replaces: Sequence[int | None] | None,
) -> list[tuple[int | StackedArray, Stack]]:
    """The results of the program: values or arrays, with the indices of the original results."""
    left: dict[int, int] = dict(enumerate(flow.results))
    by_index: dict[int, tuple[int | StackedArray, Stack]] = {}

    def give(array: StackedArray, positions: tuple[int, ...]) -> None:
        by_index[min(positions)] = array, Stack(positions, True)
        for position in positions:
            del left[position]

    news = {} if replaces is None else {old: new for new, old in enumerate(replaces)}
    for array in inputs:
        if isinstance(array, StackedArray) and all(member in news for member in array.members):
            indices = tuple([news[member] for member in array.members])
            values = tuple([flow.results[position] for position in indices])
            if len(set(values)) == len(values) and min(values) >= 0:
                existing = stacks.exactly(values)
                give(existing or stacks.add(StackedArray(values, "gathered")), indices)
    for position in range(len(flow.results)):
        if position not in left:
            continue
        of = {value: position for position, value in reversed(left.items())}
        for array in stacks.containing(left[position]):
            if array.origin in ("output", "carried", "batched", "input") and all(
                member in of for member in array.members
            ):
                give(array, tuple([of[member] for member in array.members]))
                break
        else:
            by_index[position] = left.pop(position), Stack((position,), False)
    return [by_index[position] for position in sorted(by_index)]


def _new_of(
    inputs: Sequence[int | StackedArray],
    results: Sequence[tuple[int | StackedArray, Stack]],
    replaces: Sequence[int | None] | None,
) -> dict[StackedArray, StackedArray]:
    """The stack of inputs that each stack of results replaces, row by row."""
    stacks: dict[tuple[int | None, ...], StackedArray] = {
        stack.members: stack for stack in inputs if isinstance(stack, StackedArray)
    }
    new_of: dict[StackedArray, StackedArray] = {}
    for array, stack in results:
        if replaces is not None and isinstance(array, StackedArray):
            old = stacks.get(tuple([replaces[position] for position in stack.indices]))
            if old is not None:
                new_of[array] = old
    return new_of


def _required_arrays(
    flow: EquationFlow,
    plans: Sequence[LoopPlan],
    side: SideBySide,
    stacks: StackedValues,
    results: Sequence[int | StackedArray],
    skipped: Collection[int],
    within: Mapping[int, LoopUpdates],
) -> set[StackedArray]:
    """The arrays that loops must output: all that steps outside of them read."""
    arrays = {value for value in results if isinstance(value, StackedArray)}
    values = {value for value in results if isinstance(value, int)}
    inside = {*side.batched_in, *skipped}
    for plan in plans:
        block = plan.block
        inside.update(range(block.start, block.stop))
        arrays.update(array for array, _ in plan.reads.values())
        arrays.update(array for array in plan.sliced.values() if array.origin == "output")
        values.update(first for _, first in block.carried)
        values.update(value[0] for value in block.outside.values() if len(set(value)) == 1)
    loop_of = {batch: loop for loop, value in within.items() for batch in value.batches}
    for index, batch in enumerate(side.batches):
        read = [operand for operand in batch.operands if isinstance(operand, StackedArray)]
        arrays.update(value for value in read if not _is_local(value, loop_of.get(index), loop_of))
        values.update(operand for operand in batch.operands if isinstance(operand, int))
        if batch.sliced:
            values.update(flow.operands[batch.equations[0]])
    for time, operands in enumerate(flow.operands):
        if time not in inside:
            values.update(operands)
    for array in list(arrays):
        if array.origin == "gathered":
            values.update(array.members)
    lasts = {
        int(plan.block.firsts[-1]) + plan.block.output_count + output
        for plan in plans
        for output, _ in plan.block.carried
    }
    for value in sorted(values - lasts):
        if value < 0 or flow.producers[value] not in inside:
            continue
        containing = [array for array in stacks.containing(value) if array.origin != "gathered"]
        if containing and not any(array in arrays for array in containing):
            arrays.add(containing[0])
    return arrays


def _is_local(array: StackedArray, loop: int | None, loop_of: Mapping[int, int]) -> bool:
    """Whether rows of an array are produced and read in the same iteration of a loop."""
    if loop is None or array.origin not in ("output", "batched"):
        return False
    return (array.owner if array.origin == "output" else loop_of.get(array.owner)) == loop


def _stack(value: int | StackedArray) -> Stack:
    return Stack(value.members, True) if isinstance(value, StackedArray) else Stack((value,), False)


def _struct(flow: EquationFlow, value: int | StackedArray) -> jax.ShapeDtypeStruct:
    aval = flow.avals[value.members[0] if isinstance(value, StackedArray) else value]
    lead = (len(value.members),) if isinstance(value, StackedArray) else ()
    layout = getattr(aval, "sharding", None)
    if layout is not None and layout.mesh.empty:
        layout = None
    if layout is not None and lead:
        layout = stacked_sharding(layout)
    return jax.ShapeDtypeStruct(
        (*lead, *aval.shape), aval.dtype, sharding=layout, weak_type=aval.weak_type
    )


def _types_of(flow: EquationFlow) -> contextlib.AbstractContextManager[Any]:
    """A context with 64-bit types, if the program has any."""
    wide = any(
        isinstance(aval.dtype, np.dtype) and aval.dtype.itemsize >= 8 and aval.dtype.kind in "iuf"
        for aval in flow.avals
    ) or any(isinstance(aval.dtype, np.dtype) and aval.dtype.itemsize == 16 for aval in flow.avals)
    return jax.enable_x64(True) if wide else contextlib.nullcontext()
