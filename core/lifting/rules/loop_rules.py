"""Loops and branches: interpreted inside; a carry has the same splits in every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from isoshard.core.blocks.block_values import Frame, Splits, Value, joint
from isoshard.core.blocks.interpreting import interpret_program, pack_like, rule
from isoshard.core.lifting.value_calls import agreeing, on_arrays, results_of
from isoshard.core.runtime._jax_internals.jaxpr_classes import JaxprEqn
from isoshard.core.runtime.jaxprs import scan_counts


@rule("scan")
def scan(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """What is scanned is unpacked along that axis, and the results are packed again."""
    params = eqn.params
    consts, carried, given = _parts(values, scan_counts(params))
    scanned = next((value.splits[0] for value in given if value.splits[0]), None)
    given = [value.unpacked([0]) for value in given]
    inner = [Frame(value.splits[1:], value.hints[1:]) for value in given]
    rows_of = [
        own.of(jax.ShapeDtypeStruct(value.array.shape[1:], value.array.dtype))
        for value, own in zip(given, inner, strict=True)
    ]

    def turn(values: list[Value]) -> list[Value]:
        return interpret_program(params["jaxpr"], [*consts, *values])

    carried = _settle(turn, carried, rows_of)
    count = len(carried)
    results = [*_frames(carried), *results_of(turn, [*carried, *rows_of])[count:]]
    run = on_arrays(turn, [*_frames(carried), *inner], results)

    def step(carry: tuple[Any, ...], row: tuple[Any, ...]) -> tuple[Any, Any]:
        found = run(*carry, *row)
        return tuple(found[:count]), tuple(found[count:])

    last, rows_made = lax.scan(
        step,
        tuple(value.array for value in carried),
        tuple(value.array for value in given),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    ends = [own.of(x) for x, own in zip(last, results[:count], strict=True)]
    made = [
        Frame((None, *own.splits), (None, *own.hints)).of(x)
        for x, own in zip(rows_made, results[count:], strict=True)
    ]
    packed = [pack_like([v], [scanned, *(None,) * (len(v.splits) - 1)])[0] for v in made]
    return [*ends, *packed]


@rule("while")
def while_loop(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """As long as the condition, which is a whole value, holds."""
    params = eqn.params
    asked, consts, carried = _parts(values, (params["cond_nconsts"], params["body_nconsts"]))

    def body(turn: list[Value]) -> list[Value]:
        return interpret_program(params["body_jaxpr"], [*consts, *turn])

    def goes_on(turn: list[Value]) -> list[Value]:
        return interpret_program(params["cond_jaxpr"], [*asked, *turn])

    carried = _settle(body, carried)
    frames = _frames(carried)
    run, ask = on_arrays(body, frames, frames), on_arrays(goes_on, frames, [Frame(())])
    last = lax.while_loop(
        lambda carry: ask(*carry)[0],
        lambda carry: tuple(run(*carry)),
        tuple(value.array for value in carried),
    )
    return [own.of(x) for x, own in zip(last, frames, strict=True)]


@rule("cond")
def cond(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Results are in blocks where those of every branch are."""
    which, *operands = values
    branches = [
        lambda given, branch=branch: interpret_program(branch, given)
        for branch in eqn.params["branches"]
    ]
    every = [results_of(branch, operands) for branch in branches]
    results = every[0]
    for other in every[1:]:
        results = [
            Frame(agreeing(a.splits, b.splits), agreeing(a.hints, b.hints))
            for a, b in zip(results, other, strict=True)
        ]
    runs = [on_arrays(branch, _frames(operands), results) for branch in branches]
    made = lax.switch(which.unpacked().array, runs, *(value.array for value in operands))
    return [own.of(x) for x, own in zip(made, results, strict=True)]


def _settle(
    body: Callable[[list[Value]], Sequence[Value]],
    carried: Sequence[Value],
    rows: Sequence[Value] = (),
) -> list[Value]:
    """Bring the carry into the blocks in which a step gives it back."""

    def after(values: Sequence[Value]) -> list[Splits]:
        found = results_of(body, [*values, *rows])
        return [own.splits for own in found[: len(values)]]

    settled = list(carried)
    wanted = [
        joint([(a, b) for a, b in zip(value.splits, own, strict=True)])
        for value, own in zip(settled, after(settled), strict=True)
    ]
    while wanted != _splits(settled):
        settled = [value.with_splits(own) for value, own in zip(settled, wanted, strict=True)]
        pairs = zip(settled, after(settled), strict=True)
        wanted = [agreeing(value.splits, own) for value, own in pairs]
    return settled


def _splits(values: Sequence[Value]) -> list[Splits]:
    return [value.splits for value in values]


def _frames(values: Sequence[Value]) -> list[Frame]:
    return [value.frame for value in values]


def _parts(values: list[Value], counts: tuple[int, int]) -> tuple[list[Value], ...]:
    first, second = counts[0], sum(counts)
    return values[:first], values[first:second], values[second:]
