"""A plan compiled with its equal layers as loops (`xs.compile(step, repeat="auto")`).

The plan is traced as for any program; then equal parts of the jaxpr become loops
(`isoshard.core.repeats`). A loop takes the weights of one name in all layers as one array, and
gives the new ones so. What of that can stay stacked from one run to the next, a `EqualMemory`, the
compiled program takes and gives as one array. The rest is stacked, or taken apart, inside it.

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
from isoshard.torch_bridge.engine.values import layout_numbers
from isoshard.torch_bridge.engine.values.common_mesh import refined

from . import program, recompile_reasons
from .execution_plan import CompileRequest
from .loop_copies import loop_copies
from .loop_layouts import border_layouts, stacked_layout
from .padded_blocks import has_blocks
from .plan_lowering import (
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
        whole: the layout of all as one array.
    """

    inputs: tuple[int, ...]
    results: tuple[int, ...] | None
    placed: int
    whole: int


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
    """A plan stays as it is; says why."""


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
        replaced: of memory that stays with the step, the input and the result that replaces it.
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
        found, found.arrangement = _compiled(plan, arrays, replaced, read, bounded)
        recompile_reasons.report(plan, time.perf_counter() - started)
        return found

    try:
        found = program.kept(key, compiled)
    except NotRolled as error:
        _REASONS[key] = str(error)
        raise
    return found, found.arrangement


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
        traced, kinds = traced_entries(plan, [*arrays, *_numbers(plan)])
        note_traced(plan, kinds)
        if plan.calls_host:
            raise NotRolled("it calls Python while it runs")
        labels = _labels(plan, replaced, read)
        old = {result: number for number, result in replaced.items()}
        replaces = [old.get(number) for number in range(len(plan.live))]
        found = rolled(
            traced,
            labels=labels,
            replaces=replaces,
            layouts=border_layouts(plan),
            updates=platform_of(plan) == "cpu",
        )
    if not found.loops:
        raise NotRolled("; ".join(found.reasons) or "no two layers are equal")
    families = _families(plan, found, replaced, read)
    copies = loop_copies(found, {one.inputs for one in families}, {one.results for one in families})
    if bounded and (why := copies.too_many(platform_of(plan))):
        raise NotRolled(why)
    arrangement = _arrangement(plan, found, families, replaced)

    def lower() -> jax.stages.Lowered:
        function = jax.jit(
            _joined(plan, found, arrangement),
            donate_argnums=arrangement.plan.donated,
            keep_unused=True,
        )
        structs = [_struct(one, arrays) for one in arrangement.inputs]
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
    if any(map(layout_numbers.is_resting, named)):
        raise NotRolled("it has arrays that rest in host memory")
    if are_restated(named):
        raise NotRolled("it has arrays on a mesh with Explicit axes, or on several meshes")


def _numbers(plan: CompileRequest) -> list[jax.ShapeDtypeStruct]:
    """Each lifted float and random word by itself."""
    floats, words = extra_inputs(plan)
    return [
        *[jax.ShapeDtypeStruct((), floats.dtype, sharding=floats.sharding)] * plan.lifted,
        *[jax.ShapeDtypeStruct((3,), words.dtype, sharding=words.sharding)] * plan.draws,
    ]


def _labels(
    plan: CompileRequest, replaced: Mapping[int, int], read: Collection[int]
) -> list[tuple[Any, ...]]:
    """What inputs must have alike to be one stack."""

    def label(number: int) -> tuple[Any, ...]:
        if number in replaced:
            return ("replaced", plan.placed[number], plan.wanted[replaced[number]])
        return ("read" if number in read else "other", plan.placed[number])

    leaves = map(label, range(len(plan.leaves)))
    return [*leaves, *[("float",)] * plan.lifted, *[("word",)] * plan.draws]


def _families(
    plan: CompileRequest, found: Rolled, replaced: Mapping[int, int], read: Collection[int]
) -> list[EqualMemory]:
    """The stacks that can be one array of the program, and stay one from run to run."""
    given = {stack.numbers for stack in found.results if stack.stacked}
    families: list[EqualMemory] = []
    taken: set[int] = set()
    for stack in found.inputs:
        if not stack.stacked or not taken.isdisjoint(stack.numbers):
            continue
        if any(number >= len(plan.leaves) for number in stack.numbers):
            continue
        layouts = {plan.placed[number] for number in stack.numbers}
        results = None
        if stack.numbers and all(number in replaced for number in stack.numbers):
            results = tuple(replaced[number] for number in stack.numbers)
            layouts |= {plan.wanted[number] for number in results}
            if results not in given:
                continue
        elif not all(number in read for number in stack.numbers):
            continue
        if len(layouts) == 1:
            placed = layouts.pop()
            families.append(EqualMemory(stack.numbers, results, placed, stacked_layout(placed)))
            taken.update(stack.numbers)
    return families


def _arrangement(
    plan: CompileRequest,
    found: Rolled,
    families: Sequence[EqualMemory],
    replaced: Mapping[int, int],
) -> Arrangement:
    """The order of what the program takes and gives.

    JAX pairs donated inputs with results in order: what replaces an input stands where that does.
    """
    of_input = {family.inputs[0]: family for family in families}
    inside = {number for family in families for number in family.inputs}
    inputs = [
        of_input.get(number, number)
        for number in range(len(plan.leaves))
        if number in of_input or number not in inside
    ]
    results: list[int | EqualMemory] = []
    for one in inputs:
        if isinstance(one, EqualMemory):
            results += [one] * (one.results is not None)
        elif one in replaced:
            results.append(replaced[one])
    there = {
        n
        for one in results
        for n in ((one.results or ()) if isinstance(one, EqualMemory) else (one,))
    }
    results += [number for number in range(len(plan.live)) if number not in there]
    donated = {*plan.donated}
    run = dataclasses.replace(
        plan,
        placed=tuple(
            one.whole if isinstance(one, EqualMemory) else plan.placed[one] for one in inputs
        ),
        wanted=tuple(
            one.whole if isinstance(one, EqualMemory) else plan.wanted[one] for one in results
        ),
        live=tuple(range(len(results))),
        donated=tuple(
            place
            for place, one in enumerate(inputs)
            if (one.results is not None if isinstance(one, EqualMemory) else one in donated)
        ),
    )
    return Arrangement(run, tuple(inputs), tuple(results), said(found))


def said(found: Rolled) -> str:
    """How many layers are how many loops.

    Args:
        found: with at least one loop.
    """
    loops = len(found.loops)
    layers = max(loop.length for loop in found.loops)
    return f"{layers} layers as {loops} loop{'s' * (loops != 1)}"


def _struct(one: int | EqualMemory, arrays: Sequence[jax.Array]) -> Any:
    """An input of the rolled program, for tracing."""
    if not isinstance(one, EqualMemory):
        return arrays[one]
    member = arrays[one.inputs[0]]
    number = one.whole
    layout: Any = None if number == layout_numbers.UNPLACED else layout_numbers.sharding(number)
    return jax.ShapeDtypeStruct((len(one.inputs), *member.shape), member.dtype, sharding=layout)


def _joined(plan: CompileRequest, found: Rolled, arrangement: Arrangement) -> Callable[..., Any]:
    """The rolled program as a function of what is arranged, of lifted floats and random words."""
    run = jaxpr_as_fun(found.program)

    def isoshard_step(*arguments: Any) -> list[Any]:
        *given, floats, words = arguments
        taken = _Taken(len(plan.leaves), arrangement.inputs, given, floats, words)
        values = run(*map(taken.of, found.inputs))
        single: dict[int, Any] = {}
        whole: dict[tuple[int, ...], Any] = {}
        kept = {one.results for one in arrangement.results if isinstance(one, EqualMemory)}
        for stack, value in zip(found.results, values, strict=True):
            if not stack.stacked:
                single[stack.numbers[0]] = value
            elif stack.numbers in kept:
                whole[stack.numbers] = value
            else:
                single.update((number, value[n]) for n, number in enumerate(stack.numbers))
        return [
            _laid_out(whole[one.results or ()], one.whole)
            if isinstance(one, EqualMemory)
            else _laid_out(single[one], plan.wanted[one])
            for one in arrangement.results
        ]

    return isoshard_step


def _laid_out(value: Any, number: int) -> Any:
    if number == layout_numbers.UNPLACED:
        return value
    return jax.lax.with_sharding_constraint(value, layout_numbers.sharding(refined(number)))


class _Taken:
    """What a rolled program takes, made of what it is given."""

    def __init__(
        self, leaves: int, inputs: Sequence[int | EqualMemory], given: Sequence[Any], *numbers: Any
    ):
        self._leaves = leaves
        self._floats, self._words = numbers
        self._whole: dict[tuple[int, ...], Any] = {}
        self._single: dict[int, Any] = {}
        self._slices: dict[int, tuple[Any, int]] = {}
        for one, value in zip(inputs, given, strict=True):
            if isinstance(one, EqualMemory):
                self._whole[one.inputs] = value
                self._slices.update((n, (value, place)) for place, n in enumerate(one.inputs))
            else:
                self._single[one] = value

    def of(self, stack: Stack) -> Any:
        """What stands for some inputs of the traced plan."""
        numbers = stack.numbers
        if numbers in self._whole and stack.stacked:
            return self._whole[numbers]
        if not stack.stacked:
            return self._one(numbers[0])
        floats = self._leaves + self._floats.shape[0]
        if numbers[0] >= floats:
            return self._words[np.array(numbers) - floats]
        if numbers[0] >= self._leaves:
            return self._floats[np.array(numbers) - self._leaves]
        return jnp.stack([self._one(number) for number in numbers])

    def _one(self, number: int) -> Any:
        if number in self._single:
            return self._single[number]
        if number in self._slices:
            whole, place = self._slices[number]
            return whole[place]
        number -= self._leaves
        floats = self._floats.shape[0]
        return self._floats[number] if number < floats else self._words[number - floats]
