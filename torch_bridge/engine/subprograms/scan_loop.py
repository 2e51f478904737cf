"""A subprogram as the body of a `jax.lax.scan` forward, its VJP as that of one backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from isoshard.core.repeats.jaxpr_functions import strong
from isoshard.core.runtime.caches import PROGRAMS, Interned
from isoshard.core.runtime.shard_map_axes import vary_alike
from isoshard.torch_bridge.engine.values.value import Aval

from .traced_vjp import TracedVjp
from .vjp_entries import EntriesKey, VjpEntries, saved_numbers
from .vjp_partition import cut_both


@dataclasses.dataclass(frozen=True)
class _ScanKey(EntriesKey):
    """What makes two loops the same program.

    The inputs are the carries and what the loop scans over. The subprogram forward takes carries,
    what is written to, slices, and the rest from around.

    Attributes:
        length: how often the body runs.
        carries: how many carries there are.
        slices: how many inputs it scans over.
        carried: numbers of what the body writes to, among what it takes from around.
        axes: of a `jax.shard_map` around, over which the body communicates.
    """

    length: int
    carries: int
    slices: int
    carried: tuple[int, ...]
    axes: frozenset[str]


class ScanLoop(VjpEntries):
    """Both loops; the results of forward are the last carries and stacked results."""

    key: _ScanKey

    def _forward(self, arrays: Sequence[Any], scalars: Any, key: Any) -> list[Any]:
        known, parts = self.key, self.key.parts
        carries, slices = known.carries, known.slices
        around = arrays[carries + slices :]
        init = [*arrays[:carries], *(around[number] for number in known.carried)]
        rest = [array for n, array in enumerate(around) if n not in known.carried]
        keys = jax.random.split(key, known.length) if parts.forward.draws else None
        count = len(known.results)
        results = count - len(known.carried)

        def body(carry: Any, now: Any) -> Any:
            xs, key = now
            out = parts.run_forward([*carry, *xs, *rest], scalars, key)
            state = [*out[:carries], *out[results:count]]
            return [strong(one) for one in state], (out[carries:results], out[count:])

        along = list(arrays[carries : carries + slices])
        init, rest, along, keys = vary_alike((init, rest, along, keys), known.axes)
        last, (ys, kept) = jax.lax.scan(body, init, (along, keys), known.length)
        return [*last[:carries], *ys, *last[carries:], *kept]

    def _backward(self, arrays: Sequence[Any], scalars: Any, _key: Any) -> list[Any]:
        known, parts = self.key, self.key.parts
        carries, inputs = known.carries, known.carries + known.slices
        count = len(known.differentiable)
        given = dict(zip(known.differentiable, arrays[:count], strict=True))
        saved = dict(zip(known.saved, arrays[count : count + len(known.saved)], strict=True))
        kept = list(arrays[count + len(known.saved) :])
        along = {number: array for number, array in saved.items() if number < inputs}
        mine = [n for n, number in enumerate(parts.wanted) if number < carries]
        sums = [n for n, number in enumerate(parts.wanted) if number >= inputs]
        ys = {number: array for number, array in given.items() if number >= carries}
        zeros = [jnp.zeros(*aval.token) for aval in self.gradients]

        def body(state: Any, now: Any) -> Any:
            grads, sums_so_far = state
            ys, along, kept = now
            mine_now = {parts.wanted[n]: grad for n, grad in zip(mine, grads, strict=True)}
            inputs = [ys[n] if n >= carries else mine_now[n] for n in known.differentiable]
            inputs += [along.get(number, array) for number, array in saved.items()]
            new = [strong(one) for one in parts.run_backward([*inputs, *kept], scalars)]
            added = [a + new[n] for a, n in zip(sums_so_far, sums, strict=True)]
            rest = [g for n, g in enumerate(new) if n not in mine and n not in sums]
            return ([new[n] for n in mine], added), rest

        start = [given[parts.wanted[n]] if parts.wanted[n] in given else zeros[n] for n in mine]
        state = (start, [zeros[n] for n in sums])
        values = list(saved.values())
        found = vary_alike((state, ys, along, kept, values), known.axes)
        state, ys, along, kept, values = found
        saved = dict(zip(saved, values, strict=True))
        (grads, added), stacks = jax.lax.scan(
            body, state, (ys, along, kept), known.length, reverse=True
        )
        return [*grads, *stacks, *added]


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
    around, carried, rest = captured_slots(run)
    each = [*run.inputs[:carries], *(around[n] for n in carried)]
    ends = [*run.results, *(slot for _, slot in run.written)]
    parts = cut_both(
        run, [*each, *run.inputs[carries:], *rest], ends, each, wants=wants, recompute=recompute
    )
    written = [storage.aval for storage, _ in run.written]
    key = _ScanKey(
        parts,
        (*run.avals, *written),
        saved_numbers(run, parts, around),
        tuple(run.differentiable) if parts.backward else (),
        length,
        carries,
        slices,
        carried,
        frozenset(subtrace.axes or ()),
    )
    loop = _LOOPS.lookup(key)
    if loop is None:
        tokens = [subtrace.tokens[slot] for slot in [*run.inputs, *around]]
        inputs = [
            jax.ShapeDtypeStruct((length, *size) if carries <= n < carries + slices else size, kind)
            for n, (size, kind) in enumerate(tokens)
        ]
        made = ScanLoop(
            key,
            inputs,
            (f"scan of {length} steps", f"backward scan of {length} steps"),
            [*run.avals[:carries], *(stacked(a, length) for a in run.avals[carries:]), *written],
            [
                stacked(aval, length) if carries <= number < carries + slices else aval
                for number, aval in zip(parts.wanted, parts.avals, strict=True)
            ],
            draws=bool(parts.forward.draws),
        )
        loop = _LOOPS.intern(key, made)
    return loop


def captured_slots(run: TracedVjp) -> tuple[list[int], tuple[int, ...], list[int]]:
    """What a recorded body takes from around it.

    Returns:
        The slots of all of it; the indices of those that the body writes to, which a loop carries
        from one iteration to the next; and the slots of the others, which stay.
    """
    slots = run.subtrace.around_slots()
    indices = {id(storage): index for index, storage in enumerate(run.subtrace.outside)}
    written = tuple([indices[id(storage)] for storage, _ in run.written])
    return slots, written, [slot for index, slot in enumerate(slots) if index not in written]


_LOOPS: Interned[_ScanKey, ScanLoop] = Interned(PROGRAMS, "engine: scans")


def stacked(aval: Aval, length: int) -> Aval:
    """Of as many arrays, along a new leading axis."""
    return Aval.contiguous((length, *aval.meta.size), aval.meta.dtype)
