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
    """The scanned axis is unpacked, and that of the results repacked."""
    params = eqn.params
    consts, carry, xs = _groups(values, scan_counts(params))
    scanned = next((value.splits[0] for value in xs if value.splits[0]), None)
    xs = [value.unpacked([0]) for value in xs]
    inner = [Frame(value.splits[1:], value.hints[1:]) for value in xs]
    rows_of = [
        frame.of(jax.ShapeDtypeStruct(value.array.shape[1:], value.array.dtype))
        for value, frame in zip(xs, inner, strict=True)
    ]

    def turn(values: list[Value]) -> list[Value]:
        return interpret_program(params["jaxpr"], [*consts, *values])

    carry = _settle(turn, carry, rows_of)
    count = len(carry)
    results = [*_frames(carry), *results_of(turn, [*carry, *rows_of])[count:]]
    run = on_arrays(turn, [*_frames(carry), *inner], results)

    def step(carry_in: tuple[Any, ...], row: tuple[Any, ...]) -> tuple[Any, Any]:
        outputs = run(*carry_in, *row)
        return tuple(outputs[:count]), tuple(outputs[count:])

    last, ys = lax.scan(
        step,
        tuple(value.array for value in carry),
        tuple(value.array for value in xs),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    ends = [frame.of(x) for x, frame in zip(last, results[:count], strict=True)]
    stacked = [
        Frame((None, *frame.splits), (None, *frame.hints)).of(x)
        for x, frame in zip(ys, results[count:], strict=True)
    ]
    packed = [pack_like([v], [scanned, *(None,) * (len(v.splits) - 1)])[0] for v in stacked]
    return [*ends, *packed]


@rule("while")
def while_loop(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """The carry keeps its blocks; the condition is an unsplit scalar."""
    params = eqn.params
    cond_consts, consts, carry = _groups(values, (params["cond_nconsts"], params["body_nconsts"]))

    def body(turn: list[Value]) -> list[Value]:
        return interpret_program(params["body_jaxpr"], [*consts, *turn])

    def goes_on(turn: list[Value]) -> list[Value]:
        return interpret_program(params["cond_jaxpr"], [*cond_consts, *turn])

    carry = _settle(body, carry)
    frames = _frames(carry)
    run, condition = on_arrays(body, frames, frames), on_arrays(goes_on, frames, [Frame(())])
    last = lax.while_loop(
        lambda carry: condition(*carry)[0],
        lambda carry: tuple(run(*carry)),
        tuple(value.array for value in carry),
    )
    return [frame.of(x) for x, frame in zip(last, frames, strict=True)]


@rule("cond")
def cond(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Results are in blocks where those of every branch are."""
    which, *operands = values
    branches = [
        lambda values, branch=branch: interpret_program(branch, values)
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
    outputs = lax.switch(which.unpacked().array, runs, *(value.array for value in operands))
    return [frame.of(x) for x, frame in zip(outputs, results, strict=True)]


def _settle(
    body: Callable[[list[Value]], Sequence[Value]],
    carry: Sequence[Value],
    rows: Sequence[Value] = (),
) -> list[Value]:
    """Repack the carry until a step returns it in the same blocks."""

    def after(values: Sequence[Value]) -> list[Splits]:
        frames = results_of(body, [*values, *rows])
        return [splits.splits for splits in frames[: len(values)]]

    settled = list(carry)
    target = [
        joint([(a, b) for a, b in zip(value.splits, splits, strict=True)])
        for value, splits in zip(settled, after(settled), strict=True)
    ]
    while target != _splits(settled):
        settled = [value.with_splits(splits) for value, splits in zip(settled, target, strict=True)]
        pairs = zip(settled, after(settled), strict=True)
        target = [agreeing(value.splits, splits) for value, splits in pairs]
    return settled


def _splits(values: Sequence[Value]) -> list[Splits]:
    return [value.splits for value in values]


def _frames(values: Sequence[Value]) -> list[Frame]:
    return [value.frame for value in values]


def _groups(values: list[Value], counts: tuple[int, int]) -> tuple[list[Value], ...]:
    first, second = counts[0], sum(counts)
    return values[:first], values[first:second], values[second:]
