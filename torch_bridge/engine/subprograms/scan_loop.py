"""A subprogram as the body of a `jax.lax.scan` forward, its VJP as that of one backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from isoshard.core.runtime.bounded import PROGRAMS, Interned
from isoshard.torch_bridge.dtypes import logical_dtype
from isoshard.torch_bridge.engine.recording.tape import Recipe
from isoshard.torch_bridge.engine.values.value import Aval

from .subprogram import Subprogram
from .traced_vjp import TracedVjp
from .vjp_partition import cut_both


@dataclasses.dataclass(frozen=True)
class _ScanKey:
    """What makes two loops the same program.

    Numbers count the tensors a loop is called with: the carries, what it scans over, tensors from
    around that want a gradient, and last what it takes from around.

    Attributes:
        length: how often the body runs.
        widths: how many tensors there are of each kind.
        carried: those of the last kind that the body writes to.
        results: the avals of the body's carries and results.
        written: the avals of what it writes to.
        differentiable: numbers of the results that have a gradient.
        forward: the body: takes carries, what is written to, slices, and the rest from around;
            gives carries, what is written, results, and the residuals.
        backward: the VJP of the body: takes the gradients of the differentiable results, the
            tensors `saved`, and the residuals; gives the gradients of the tensors `wanted`, where
            it `has` one. None if none is wanted.
        saved: numbers of the tensors that backward needs.
        wanted: numbers of the tensors whose gradients are wanted.
        has: whether each of those has a gradient.
        wanted_avals: their avals.
    """

    length: int
    widths: tuple[int, int, int, int]
    carried: tuple[int, ...]
    results: tuple[Aval, ...]
    written: tuple[Aval, ...]
    differentiable: tuple[int, ...]
    forward: Subprogram
    backward: Subprogram | None
    saved: tuple[int, ...]
    wanted: tuple[int, ...]
    has: tuple[bool, ...]
    wanted_avals: tuple[Aval, ...]


class ScanLoop:
    """Both loops.

    Attributes:
        shape: see `_ScanKey`.
        forward: takes carries, what it scans over, and what it takes from around; gives the last
            carries, stacked results, what was written, and `residuals`.
        backward: takes the gradients of the differentiable results, the tensors `saved`, and the
            residuals; gives the gradients of the tensors `wanted`.
        results: the avals of carries and stacked results.
        residuals: the avals of what the forward loop keeps for the backward loop.
    """

    def __init__(self, shape: _ScanKey, inputs: Sequence[Any]):
        """See `loop_of`."""
        self.shape = shape
        carries = shape.widths[0]
        self.results = [
            aval if number < carries else _stacked(shape.length, aval)
            for number, aval in enumerate(shape.results)
        ]
        draws = bool(shape.forward.draws)
        key = jax.eval_shape(lambda: jax.random.key(0)) if draws else None
        floats = [jax.ShapeDtypeStruct((), jnp.float64)] * len(shape.forward.scalars)
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            found = jax.eval_shape(self._forward, inputs, floats, key)
        known = len(shape.results) + len(shape.written)
        self.residuals = [
            Aval.contiguous(tuple(one.shape), logical_dtype(one.dtype)) for one in found[known:]
        ]
        self.forward = Recipe(
            f"scan of {shape.length} steps",
            self._forward,
            len(found),
            random=draws,
            lifted=len(shape.forward.scalars),
        )
        if shape.backward is not None:
            self.backward = Recipe(
                f"backward scan of {shape.length} steps",
                self._backward,
                len(shape.wanted),
                lifted=len(shape.backward.scalars),
            )

    def _forward(self, arrays: Sequence[Any], scalars: Any, key: Any) -> list[Any]:
        shape = self.shape
        carries, slices, _, _ = shape.widths
        around = arrays[carries + slices :]
        init = [*arrays[:carries], *(around[number] for number in shape.carried)]
        rest = [array for n, array in enumerate(around) if n not in shape.carried]
        keys = jax.random.split(key, shape.length) if shape.forward.draws else None
        results, written = len(shape.results), len(shape.written)

        def body(carry: Any, now: Any) -> Any:
            xs, key = now
            out = shape.forward.run([*carry, *xs, *rest], scalars, key)
            kept = out[results + written :]
            if shape.backward is not None and shape.backward.draws:
                kept.append(jax.random.key_data(key))
            state = [*out[:carries], *out[results : results + written]]
            return [_strong(one) for one in state], (out[carries:results], kept)

        along = list(arrays[carries : carries + slices])
        last, (ys, kept) = jax.lax.scan(body, init, (along, keys), shape.length)
        return [*last[:carries], *ys, *last[carries:], *kept]

    def _backward(self, arrays: Sequence[Any], scalars: Any, _key: Any) -> list[Any]:
        shape = self.shape
        piece = shape.backward
        assert piece is not None
        carries, slices = shape.widths[:2]
        count = len(shape.differentiable)
        given = dict(zip(shape.differentiable, arrays[:count], strict=True))
        saved = dict(zip(shape.saved, arrays[count : count + len(shape.saved)], strict=True))
        kept = list(arrays[count + len(shape.saved) :])
        along = {number: array for number, array in saved.items() if number < carries + slices}
        mine = [n for n, number in enumerate(shape.wanted) if number < carries]
        sums = [n for n, number in enumerate(shape.wanted) if number >= carries + slices]
        ys = {number: array for number, array in given.items() if number >= carries}
        zeros = [jnp.zeros(*aval.token) for aval in shape.wanted_avals]

        def body(state: Any, now: Any) -> Any:
            grads, sums_so_far = state
            ys, along, kept = now
            known = {shape.wanted[n]: grad for n, grad in zip(mine, grads, strict=True)}
            key = jax.random.wrap_key_data(kept[-1]) if piece.draws else None
            inputs = [ys[n] if n >= carries else known[n] for n in shape.differentiable]
            inputs += [along.get(number, array) for number, array in saved.items()]
            inputs += kept[: len(kept) - bool(piece.draws)]
            found = iter(piece.run(inputs, scalars, key))
            new = [
                _strong(next(found)).astype(aval.physical) if has else jnp.zeros(*aval.token)
                for has, aval in zip(shape.has, self._each_avals(), strict=True)
            ]
            added = [a + new[n] for a, n in zip(sums_so_far, sums, strict=True)]
            rest = [g for n, g in enumerate(new) if n not in mine and n not in sums]
            return ([new[n] for n in mine], added), rest

        start = [given[shape.wanted[n]] if shape.wanted[n] in given else zeros[n] for n in mine]
        state = (start, [zeros[n] for n in sums])
        (grads, added), stacks = jax.lax.scan(
            body, state, (ys, along, kept), shape.length, reverse=True
        )
        return [*grads, *stacks, *added]

    def _each_avals(self) -> list[Aval]:
        """The avals of the gradients that the body gives."""
        carries, slices = self.shape.widths[:2]
        return [
            Aval.contiguous(aval.meta.size[1:], aval.meta.dtype)
            if carries <= number < carries + slices
            else aval
            for number, aval in zip(self.shape.wanted, self.shape.wanted_avals, strict=True)
        ]


def loop_of(
    run: TracedVjp, carries: int, slices: int, length: int, *, wants: bool, recompute: bool
) -> ScanLoop:
    """The loops over a recorded body; those of equal bodies are one object.

    Args:
        run: the body: takes carries and slices, and gives carries and results.
        carries: how many carries there are.
        slices: how many slices it takes.
        length: how often it runs.
        wants: whether a tensor that it is called with wants a gradient.
        recompute: keep only the carries for backward.
    """
    subtrace = run.subtrace
    wants = (wants or bool(subtrace.aliases)) and bool(run.differentiable)
    around = [*subtrace.outside_slots(), *subtrace.constant_slots()]
    places = {id(storage): number for number, storage in enumerate(subtrace.outside)}
    carried = tuple([places[id(storage)] for storage, _ in run.written])
    rest = [slot for n, slot in enumerate(around) if n not in carried]
    each = [*run.inputs[:carries], *(around[n] for n in carried)]
    ends = [*run.results, *(slot for _, slot in run.written)]
    parts = cut_both(
        run, [*each, *run.inputs[carries:], *rest], ends, each, wants=wants, recompute=recompute
    )
    first = carries + slices + (len(subtrace.aliases) if wants else 0)
    numbers = {slot: n for n, slot in enumerate(run.inputs)}
    numbers |= {slot: first + n for n, slot in enumerate(around)}
    shape = _ScanKey(
        length,
        (carries, slices, first - carries - slices, len(around)),
        carried,
        tuple(run.avals),
        tuple([storage.aval for storage, _ in run.written]),
        tuple(run.differentiable) if wants else (),
        parts.forward,
        parts.backward,
        tuple([numbers[slot] for slot in parts.used]),
        parts.wanted,
        parts.has,
        tuple(
            [
                _stacked(length, aval) if carries <= number < carries + slices else aval
                for number, aval in zip(parts.wanted, parts.avals, strict=True)
            ]
        ),
    )
    loop = _LOOPS.lookup(shape)
    if loop is None:
        tokens = [subtrace.tokens[slot] for slot in [*run.inputs, *around]]
        inputs = [
            jax.ShapeDtypeStruct((length, *size) if carries <= n < carries + slices else size, kind)
            for n, (size, kind) in enumerate(tokens)
        ]
        loop = _LOOPS.intern(shape, ScanLoop(shape, inputs))
    return loop


_LOOPS: Interned[_ScanKey, ScanLoop] = Interned(PROGRAMS)


def _stacked(length: int, aval: Aval) -> Aval:
    return Aval.contiguous((length, *aval.meta.size), aval.meta.dtype)


def _strong(array: Any) -> jax.Array:
    """Without JAX's weak type, which a loop may not carry."""
    return jax.lax.convert_element_type(array, array.dtype)
