"""A plan compiled with its equal layers as loops (`xs.compile(step, repeat="auto")`).

The plan is traced as for any program; then equal parts of the jaxpr become loops
(`isoshard.core.repeats`). A loop takes the weights of one name in all layers as one array, and
gives the new ones so. What of that can remain stacked from one run to the next, an `EqualMemory`,
the compiled program takes and returns as one array. The rest is stacked and unstacked inside it.

Lifted floats and random words come in one array each, as always: for tracing they are inputs of
their own, so that those of equal layers are found, and the loops take what they need of the array.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.repeats.rolled_program import Rolled, Stack, rolled
from isoshard.core.runtime._jax_internals.jaxpr_classes import jaxpr_as_fun
from isoshard.core.runtime.caches import PROGRAMS, Bounded
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.engine.values.common_mesh import refined

from . import program, recompile_reasons
from .compile_request import CompileRequest
from .loop_copies import loop_copies
from .loop_layouts import boundary_layouts, stacked_layout
from .padded_blocks import has_blocks
from .plan_lowering import (
    donatable,
    extra_inputs,
    layouts_in,
    note_traced,
    platform_of,
    tracing,
)
from .result_meshes import are_restated
from .traced_entries import traced_entries


@dataclasses.dataclass(frozen=True)
class EqualMemory:
    """Equal memory of several layers, as one array of a program.

    Attributes:
        inputs: of the layers in order, numbers of the plan's inputs.
        results: of the plan's results that replace them; None: the program only reads them.
        placed: the layout of each.
        stack_layout: the layout of all as one array.
    """

    inputs: tuple[int, ...]
    results: tuple[int, ...] | None
    placed: int
    stack_layout: int


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """What a rolled program takes and gives: families, or inputs and results of the plan.

    Attributes:
        plan: as the program is run: with the layouts of what it takes and gives.
        inputs: numbers of the plan's inputs, and families.
        results: numbers of the plan's results, and families.
        text: how many layers are how many loops.
    """

    plan: CompileRequest
    inputs: tuple[int | EqualMemory, ...]
    results: tuple[int | EqualMemory, ...]
    text: str


class NotRolled(Exception):
    """A plan that is not rolled, with the reason."""


def rolled_program(
    plan: CompileRequest,
    arrays: Sequence[jax.Array],
    replaced: Mapping[int, int],
    read: Collection[int],
    *,
    bounded: bool,
) -> tuple[program.Program, Arrangement]:
    """The program of a plan with its layers as loops, compiled the first time.

    Args:
        plan: what to compile.
        arrays: its inputs.
        replaced: of memory that belongs to the step, the input and the result that replaces it.
        read: the inputs that are memory which the plan only reads.
        bounded: loops that would copy too much are none (`loop_copies.py`).

    Raises:
        NotRolled: there are no equal layers, or the plan has what loops do not support, or they
            copy too much.
    """
    memory = tuple(sorted(replaced.items())), tuple(sorted(read))
    key = ("rolled", plan.lean().key(), memory, bounded)
    if key in _REASONS:
        raise NotRolled(_REASONS[key])

    def compiled() -> program.Program:
        started = time.perf_counter()
        entry, entry.arrangement = _compiled(plan, arrays, replaced, read, bounded)
        recompile_reasons.report(plan, time.perf_counter() - started)
        return entry

    try:
        entry = program.cached_program(key, compiled)
    except NotRolled as error:
        _REASONS[key] = str(error)
        raise
    return entry, entry.arrangement


_REASONS: Bounded[Any, str] = Bounded(PROGRAMS, "engine: why programs have no loops")


def _compiled(
    plan: CompileRequest,
    arrays: Sequence[jax.Array],
    replaced: Mapping[int, int],
    read: Collection[int],
    bounded: bool,
) -> tuple[program.Program, Arrangement]:
    _refuse(plan)
    with tracing(plan, arrays):
        traced, kinds = traced_entries(plan, [*arrays, *_split_extra_inputs(plan)])
        note_traced(plan, kinds)
        if plan.calls_host:
            raise NotRolled("it calls Python while it runs")
        labels = _labels(plan, replaced, read)
        old = {result: index for index, result in replaced.items()}
        replaces = [old.get(index) for index in range(len(plan.live))]
        rolled_step = rolled(
            traced,
            labels=labels,
            replaces=replaces,
            layouts=boundary_layouts(plan),
            updates=platform_of(plan) == "cpu",
        )
    if not rolled_step.loops:
        raise NotRolled("; ".join(rolled_step.reasons) or "no two layers are equal")
    families = _families(plan, rolled_step, replaced, read)
    copies = loop_copies(
        rolled_step, {family.inputs for family in families}, {family.results for family in families}
    )
    if bounded and (why := copies.too_many(platform_of(plan))):
        raise NotRolled(why)
    arrangement = _arrangement(plan, rolled_step, families, replaced)

    def lower() -> jax.stages.Lowered:
        function = jax.jit(
            _joined(plan, rolled_step, arrangement),
            donate_argnums=donatable(arrangement.plan),
            keep_unused=True,
        )
        structs = [_struct(input_, arrays) for input_ in arrangement.inputs]
        with tracing(plan, arrays):
            return function.trace(*structs, *extra_inputs(plan)).lower()

    return program.build(plan, arrays, lower), arrangement


def _refuse(plan: CompileRequest) -> None:
    """Raise for what loops do not support.

    Raises:
        NotRolled: there is such.
    """
    named = layouts_in(plan)
    if has_blocks(named):
        raise NotRolled("it has arrays in blocks of unequal sizes")
    if any(map(sharding_ids.is_on_host, named)):
        raise NotRolled("it has arrays in host memory")
    if are_restated(named):
        raise NotRolled("it has arrays on a mesh with Explicit axes, or on several meshes")


def _split_extra_inputs(plan: CompileRequest) -> list[jax.ShapeDtypeStruct]:
    """Each lifted float and random word by itself."""
    floats, words = extra_inputs(plan)
    return [
        *[jax.ShapeDtypeStruct((), floats.dtype, sharding=floats.sharding)] * plan.lifted,
        *[jax.ShapeDtypeStruct((3,), words.dtype, sharding=words.sharding)] * plan.draws,
    ]


def _labels(
    plan: CompileRequest, replaced: Mapping[int, int], read: Collection[int]
) -> list[tuple[Any, ...]]:
    """What inputs must have in common to be one stack."""

    def label(index: int) -> tuple[Any, ...]:
        if index in replaced:
            return ("replaced", plan.placed[index], plan.result_layouts[replaced[index]])
        return ("read" if index in read else "other", plan.placed[index])

    leaves = map(label, range(len(plan.leaves)))
    return [*leaves, *[("float",)] * plan.lifted, *[("word",)] * plan.draws]


def _families(
    plan: CompileRequest, rolled_step: Rolled, replaced: Mapping[int, int], read: Collection[int]
) -> list[EqualMemory]:
    """The stacks that are one array of the program from run to run."""
    stacked = {stack.indices for stack in rolled_step.results if stack.stacked}
    families: list[EqualMemory] = []
    taken: set[int] = set()
    for stack in rolled_step.inputs:
        if not stack.stacked or not taken.isdisjoint(stack.indices):
            continue
        if any(index >= len(plan.leaves) for index in stack.indices):
            continue
        layouts = {plan.placed[index] for index in stack.indices}
        results = None
        if stack.indices and all(index in replaced for index in stack.indices):
            results = tuple(replaced[index] for index in stack.indices)
            layouts |= {plan.result_layouts[index] for index in results}
            if results not in stacked:
                continue
        elif not all(index in read for index in stack.indices):
            continue
        if len(layouts) == 1:
            placed = layouts.pop()
            families.append(EqualMemory(stack.indices, results, placed, stacked_layout(placed)))
            taken.update(stack.indices)
    return families


def _arrangement(
    plan: CompileRequest,
    rolled_step: Rolled,
    families: Sequence[EqualMemory],
    replaced: Mapping[int, int],
) -> Arrangement:
    """The order of what the program takes and gives.

    JAX pairs donated inputs with results in order: what replaces an input has its position.
    """
    of_input = {family.inputs[0]: family for family in families}
    inside = {index for family in families for index in family.inputs}
    inputs = [
        of_input.get(index, index)
        for index in range(len(plan.leaves))
        if index in of_input or index not in inside
    ]
    results: list[int | EqualMemory] = []
    for input_ in inputs:
        if isinstance(input_, EqualMemory):
            results += [input_] * (input_.results is not None)
        elif input_ in replaced:
            results.append(replaced[input_])
    there = {
        n
        for input_ in results
        for n in ((input_.results or ()) if isinstance(input_, EqualMemory) else (input_,))
    }
    results += [index for index in range(len(plan.live)) if index not in there]
    donated = {*plan.donated}
    run = dataclasses.replace(
        plan,
        placed=tuple(
            input_.stack_layout if isinstance(input_, EqualMemory) else plan.placed[input_]
            for input_ in inputs
        ),
        result_layouts=tuple(
            input_.stack_layout if isinstance(input_, EqualMemory) else plan.result_layouts[input_]
            for input_ in results
        ),
        live=tuple(range(len(results))),
        donated=tuple(
            row
            for row, input_ in enumerate(inputs)
            if (
                input_.results is not None if isinstance(input_, EqualMemory) else input_ in donated
            )
        ),
    )
    return Arrangement(run, tuple(inputs), tuple(results), describe_loops(rolled_step))


def describe_loops(rolled_step: Rolled) -> str:
    """How many layers are how many loops."""
    loops = len(rolled_step.loops)
    layers = max(loop.length for loop in rolled_step.loops)
    return f"{layers} layers as {loops} loop{'s' * (loops != 1)}"


def _struct(leaf: int | EqualMemory, arrays: Sequence[jax.Array]) -> Any:
    """An input of the rolled program, for tracing."""
    if not isinstance(leaf, EqualMemory):
        return arrays[leaf]
    member = arrays[leaf.inputs[0]]
    index = leaf.stack_layout
    layout: Any = None if index == sharding_ids.UNPLACED else sharding_ids.sharding(index)
    return jax.ShapeDtypeStruct((len(leaf.inputs), *member.shape), member.dtype, sharding=layout)


def _joined(
    plan: CompileRequest, rolled_step: Rolled, arrangement: Arrangement
) -> Callable[..., Any]:
    """The rolled program as a function of what is arranged, of lifted floats and random words."""
    run = jaxpr_as_fun(rolled_step.program)

    def isoshard_step(*arguments: Any) -> list[Any]:
        *inputs, floats, words = arguments
        taken = _Taken(len(plan.leaves), arrangement.inputs, inputs, floats, words)
        values = run(*map(taken.of, rolled_step.inputs))
        single: dict[int, Any] = {}
        stacks: dict[tuple[int, ...], Any] = {}
        stacked = {
            result.results for result in arrangement.results if isinstance(result, EqualMemory)
        }
        for stack, value in zip(rolled_step.results, values, strict=True):
            if not stack.stacked:
                single[stack.indices[0]] = value
            elif stack.indices in stacked:
                stacks[stack.indices] = value
            else:
                single.update((index, value[n]) for n, index in enumerate(stack.indices))
        return [
            _constrained(stacks[result.results or ()], result.stack_layout)
            if isinstance(result, EqualMemory)
            else _constrained(single[result], plan.result_layouts[result])
            for result in arrangement.results
        ]

    return isoshard_step


def _constrained(value: Any, layout_id: int) -> Any:
    if layout_id == sharding_ids.UNPLACED:
        return value
    return jax.lax.with_sharding_constraint(value, sharding_ids.sharding(refined(layout_id)))


class _Taken:
    """The inputs of the rolled equations, from the inputs of the compiled program."""

    def __init__(
        self,
        leaves: int,
        inputs: Sequence[int | EqualMemory],
        values: Sequence[Any],
        *indices: Any,
    ):
        self._leaves = leaves
        self._floats, self._words = indices
        self._stacks: dict[tuple[int, ...], Any] = {}
        self._single: dict[int, Any] = {}
        self._slices: dict[int, tuple[Any, int]] = {}
        for input_, value in zip(inputs, values, strict=True):
            if isinstance(input_, EqualMemory):
                self._stacks[input_.inputs] = value
                self._slices.update((n, (value, row)) for row, n in enumerate(input_.inputs))
            else:
                self._single[input_] = value

    def of(self, stack: Stack) -> Any:
        """Values for some inputs of the traced plan."""
        indices = stack.indices
        if indices in self._stacks and stack.stacked:
            return self._stacks[indices]
        if not stack.stacked:
            return self._input(indices[0])
        floats = self._leaves + self._floats.shape[0]
        if indices[0] >= floats:
            return self._words[np.array(indices) - floats]
        if indices[0] >= self._leaves:
            return self._floats[np.array(indices) - self._leaves]
        return jnp.stack([self._input(index) for index in indices])

    def _input(self, index: int) -> Any:
        if index in self._single:
            return self._single[index]
        if index in self._slices:
            stack, row = self._slices[index]
            return stack[row]
        index -= self._leaves
        floats = self._floats.shape[0]
        return self._floats[index] if index < floats else self._words[index - floats]
