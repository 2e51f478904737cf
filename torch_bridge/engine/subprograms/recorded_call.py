"""A subprogram as one entry of a program, with another one for its VJP."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from isoshard.core.runtime.caches import PROGRAMS, Interned

from .traced_vjp import TracedVjp
from .vjp_entries import EntriesKey, VjpEntries, saved_indices
from .vjp_partition import partition_vjp


@dataclasses.dataclass(frozen=True)
class _CallKey(EntriesKey):
    seeded: bool


class RecordedCall(VjpEntries):
    """Both entries; if it is seeded, `forward` takes a seed, last."""

    key: _CallKey

    def _forward(self, arrays: Sequence[Any], scalars: Any, key: Any) -> list[Any]:
        if self.key.seeded:
            *arrays, seed = arrays
            key = jax.random.key(seed)
        return super()._forward(arrays, scalars, key)


def call_of(run: TracedVjp, name: str, *, wants: bool, seeded: bool) -> RecordedCall:
    """The entries for a recorded run; those of equal runs are one object.

    Args:
        run: some code.
        name: for reports.
        wants: whether a tensor that it is called with requires a gradient.
        seeded: whether its random numbers come from a seed that it is called with.
    """
    subtrace = run.subtrace
    around = subtrace.around_slots()
    slots = [*run.inputs, *around]
    written = [*(slot for _, slot in run.written), *(slot for _, slot in run.changed)]
    partition = partition_vjp(run, slots, [*run.results, *written], wants=wants)
    avals = [storage.aval for storage, _ in run.written]
    avals += [run.input_avals[index] for index, _ in run.changed]
    key = _CallKey(
        partition,
        (*run.avals, *avals),
        saved_indices(run, partition, around),
        tuple(run.differentiable) if partition.backward else (),
        seeded,
    )
    result = _CALLS.lookup(key)
    if result is None:
        inputs = [jax.ShapeDtypeStruct(*subtrace.tokens[slot]) for slot in slots]
        inputs += [jax.ShapeDtypeStruct((), "int32")] * seeded
        draws = bool(partition.forward.draws) and not seeded
        call = RecordedCall(
            key, inputs, (name, f"gradient of {name}"), key.results, partition.avals, draws=draws
        )
        result = _CALLS.intern(key, call)
    return result


_CALLS: Interned[_CallKey, RecordedCall] = Interned(PROGRAMS, "engine: recorded calls")
