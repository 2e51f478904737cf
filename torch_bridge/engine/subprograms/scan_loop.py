"""A subprogram as the body of a `jax.lax.scan` forward, its VJP as that of one backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from isoshard.core.repeats.jaxpr_functions import strong
from isoshard.core.runtime.caches import PROGRAMS, Interned
from isoshard.core.runtime.shard_map_axes import vary_equally
from isoshard.torch_bridge.engine.values.value import Aval

from .traced_vjp import TracedVjp
from .vjp_entries import EntriesKey, VjpEntries, saved_indices
from .vjp_partition import partition_vjp


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
        spec, partition = self.key, self.key.partition
        carries, slices = spec.carries, spec.slices
        around = arrays[carries + slices :]
        init = [*arrays[:carries], *(around[index] for index in spec.carried)]
        rest = [array for n, array in enumerate(around) if n not in spec.carried]
        keys = jax.random.split(key, spec.length) if partition.forward.draws else None
        count = len(spec.results)
        results = count - len(spec.carried)

        def body(carry: Any, now: Any) -> Any:
            xs, key = now
            out = partition.run_forward([*carry, *xs, *rest], scalars, key)
            state = [*out[:carries], *out[results:count]]
            return [strong(array) for array in state], (out[carries:results], out[count:])

        slices_of = list(arrays[carries : carries + slices])
        init, rest, slices_of, keys = vary_equally((init, rest, slices_of, keys), spec.axes)
        last, (ys, residuals) = jax.lax.scan(body, init, (slices_of, keys), spec.length)
        return [*last[:carries], *ys, *last[carries:], *residuals]

    def _backward(self, arrays: Sequence[Any], scalars: Any, _key: Any) -> list[Any]:
        spec, partition = self.key, self.key.partition
        carries, inputs = spec.carries, spec.carries + spec.slices
        count = len(spec.differentiable)
        cotangents = dict(zip(spec.differentiable, arrays[:count], strict=True))
        saved = dict(zip(spec.saved, arrays[count : count + len(spec.saved)], strict=True))
        residuals = list(arrays[count + len(spec.saved) :])
        along = {index: array for index, array in saved.items() if index < inputs}
        carried_grads = [n for n, index in enumerate(partition.differentiated) if index < carries]
        sums = [n for n, index in enumerate(partition.differentiated) if index >= inputs]
        ys = {index: array for index, array in cotangents.items() if index >= carries}
        zeros = [jnp.zeros(*aval.token) for aval in self.gradients]

        def body(state: Any, now: Any) -> Any:
            grads, sums_so_far = state
            ys, along, residuals = now
            grad_of = {
                partition.differentiated[n]: grad
                for n, grad in zip(carried_grads, grads, strict=True)
            }
            inputs = [ys[n] if n >= carries else grad_of[n] for n in spec.differentiable]
            inputs += [along.get(index, array) for index, array in saved.items()]
            new = [strong(grad) for grad in partition.run_backward([*inputs, *residuals], scalars)]
            added = [a + new[n] for a, n in zip(sums_so_far, sums, strict=True)]
            rest = [g for n, g in enumerate(new) if n not in carried_grads and n not in sums]
            return ([new[n] for n in carried_grads], added), rest

        start = [
            cotangents[partition.differentiated[n]]
            if partition.differentiated[n] in cotangents
            else zeros[n]
            for n in carried_grads
        ]
        state = (start, [zeros[n] for n in sums])
        values = list(saved.values())
        result = vary_equally((state, ys, along, residuals, values), spec.axes)
        state, ys, along, residuals, values = result
        saved = dict(zip(saved, values, strict=True))
        (grads, added), stacks = jax.lax.scan(
            body, state, (ys, along, residuals), spec.length, reverse=True
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
        wants: whether a tensor that it is called with requires a gradient.
        recompute: keep only the carries for backward.
    """
    subtrace = run.subtrace
    around, carried, rest = captured_slots(run)
    each = [*run.inputs[:carries], *(around[n] for n in carried)]
    ends = [*run.results, *(slot for _, slot in run.written)]
    partition = partition_vjp(
        run, [*each, *run.inputs[carries:], *rest], ends, each, wants=wants, recompute=recompute
    )
    written = [storage.aval for storage, _ in run.written]
    key = _ScanKey(
        partition,
        (*run.avals, *written),
        saved_indices(run, partition, around),
        tuple(run.differentiable) if partition.backward else (),
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
        scan = ScanLoop(
            key,
            inputs,
            (f"scan of {length} steps", f"backward scan of {length} steps"),
            [*run.avals[:carries], *(stacked(a, length) for a in run.avals[carries:]), *written],
            [
                stacked(aval, length) if carries <= index < carries + slices else aval
                for index, aval in zip(partition.differentiated, partition.avals, strict=True)
            ],
            draws=bool(partition.forward.draws),
        )
        loop = _LOOPS.intern(key, scan)
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
