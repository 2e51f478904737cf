"""Equal layers of a program as one loop: `rolled`.

A traced step of a deep model is straight: each layer's equations again and again, forward, backward
and in the optimizer. Compilers take time for each of them. `rolled` finds what is equal, and writes
a program with one `jax.lax.scan` over layers for the forward and one for the backward, and with one
equation over all layers where nothing goes from layer to layer. Inputs of equal role (a parameter
of each layer) come stacked along a new leading axis, and so do results.

>>> import jax, jax.numpy as jnp
>>> def loss(layers, x):
...     for weight in layers:
...         x = jnp.tanh(x @ weight)
...     return jnp.sum(x)
>>> def step(layers, x):
...     return [w - 0.1 * g for w, g in zip(layers, jax.grad(loss)(layers, x))]
>>> layers, x = [jnp.full((4, 4), 0.1 * i) for i in range(6)], jnp.ones((2, 4))
>>> found = rolled(jax.make_jaxpr(step)(layers, x))
>>> [loop.length for loop in found.loops]                  # forward and backward
[5, 5]
>>> [stack.numbers for stack in found.inputs]              # the first layer's backward differs
[(0,), (1, 2, 3, 4, 5), (6,)]
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from isoshard.core.layout.spec import stacked_sharding
from isoshard.core.repeats.common_equations import computed_once
from isoshard.core.repeats.equation_flow import EquationFlow
from isoshard.core.repeats.equation_keys import equation_keys
from isoshard.core.repeats.equation_order import StepOrder
from isoshard.core.repeats.inlined_calls import inlined
from isoshard.core.repeats.loop_emission import LoopEmission
from isoshard.core.repeats.loop_extents import LoopExtents
from isoshard.core.repeats.loop_plans import LoopPlan, planned
from isoshard.core.repeats.periodic_runs import PeriodicRun, periodic_runs
from isoshard.core.repeats.recomputed_values import recomputed
from isoshard.core.repeats.repeat_borders import first_border
from isoshard.core.repeats.repeated_block import RepeatedBlock, blocks_of
from isoshard.core.repeats.shared_reductions import shared
from isoshard.core.repeats.side_by_side import SideBySide
from isoshard.core.repeats.stacked_values import StackedArray, StackedValues
from isoshard.core.repeats.updates_in_loops import LoopUpdates, updates_in
from isoshard.core.repeats.wanted_arrays import wanted_arrays
from isoshard.core.runtime._jax_internals.jaxpr_classes import ClosedJaxpr, Var
from isoshard.core.runtime.jaxprs import opened

_WORTH = 8
"""A loop saves at least so many equations."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """One input or result of a rolled program.

    Attributes:
        numbers: of the inputs (results) of the original program, in the order of the leading axis.
        stacked: False for one that is as it was.
    """

    numbers: tuple[int, ...]
    stacked: bool


@dataclasses.dataclass(frozen=True)
class Loop:
    """One loop of a rolled program.

    Attributes:
        name: the scope its operations are in.
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
        inputs: what each of its inputs is; in the order of the first number of each.
        results: likewise of results.
        loops: in order.
        batched: equations over a whole stack.
        reasons: why parts that looked alike are no loop.
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
    """Write equal parts of a program as loops.

    Args:
        program: a traced function, such as a whole training step.
        at_least: how many equal parts become a loop; 2 or more.
        labels: of each input, such as its layout; only inputs with equal labels are stacked.
        replaces: of each result the number of the input that it is the new value of, or None;
            where such inputs are a stack, their new values are one too, in the same order.
        differentiated: derivatives of the program are still taken: functions with a derivative of
            their own (`jax.custom_vjp`) are equal only if their rules are the same objects.
        layouts: gives layouts of variables of a program that computes the same. What loops carry
            and keep is constrained to them, where all iterations and the first value agree.
        updates: what an optimizer does with large gradients is done in the loop that makes them.

    Returns:
        The program with loops; without any if nothing repeats.

    Raises:
        ValueError: `at_least` is below 2, or there is not one label for each input, or not one
            entry of `replaces` for each result.
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
    flow, blocks, skipped = computed_once(flow, keys.tolist(), extents.blocks)
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
    requested = wanted_arrays(flow, plans, side, stacks, result_values, skipped, within)

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
    """Blocks that are loops, and those in which nothing goes from one iteration to the next."""
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
    """Whether a loop saves equations, and its iterations do more than add numbers up."""
    outputs = block.made_as(0)[0]
    shapes = [aval.shape for aval in block.flow.avals[outputs : outputs + block.made]]
    return block.saved >= _WORTH and any(shapes)


def _mixed_reason(run: PeriodicRun, count: int) -> str:
    return (
        f"{count} equal parts of {run.period} equations are no loop: each reads other results of "
        "those before it"
    )


def _slices_fit(flow: EquationFlow, block: RepeatedBlock, extents: LoopExtents) -> bool:
    for position, values in block.outside.items():
        equation = flow.equations[block.start + block.places[position]]
        if equation.primitive.name == "slice" and len(set(values)) > 1:
            times = range(block.start + block.places[position], block.stop, block.period)
            if len({tuple(flow.equations[time].params["start_indices"]) for time in times}) > 1:
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
        for output in range(block.made):
            values = plan.in_order(block.made_as(output))
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
    """What the program gives: values or arrays, and the numbers of the original results."""
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
        for array in stacks.homes(left[position]):
            if array.origin in ("made", "carried", "batched", "input") and all(
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
    """Of results that replace a stack of inputs, row by row, that stack."""
    stacks: dict[tuple[int | None, ...], StackedArray] = {
        stack.members: stack for stack in inputs if isinstance(stack, StackedArray)
    }
    new_of: dict[StackedArray, StackedArray] = {}
    for array, stack in results:
        if replaces is not None and isinstance(array, StackedArray):
            old = stacks.get(tuple([replaces[position] for position in stack.numbers]))
            if old is not None:
                new_of[array] = old
    return new_of


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
    """64-bit types where the program has them."""
    wide = any(
        isinstance(aval.dtype, np.dtype) and aval.dtype.itemsize >= 8 and aval.dtype.kind in "iuf"
        for aval in flow.avals
    ) or any(isinstance(aval.dtype, np.dtype) and aval.dtype.itemsize == 16 for aval in flow.avals)
    return jax.enable_x64(True) if wide else contextlib.nullcontext()
