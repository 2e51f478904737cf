"""A subprogram as one entry of a program, with another one for its VJP."""

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

from .traced_vjp import TracedVjp
from .vjp_partition import VjpPartition, cut_both


@dataclasses.dataclass(frozen=True)
class _CallKey:
    """What makes two entries the same; see `RecordedCall`."""

    parts: VjpPartition
    results: tuple[Aval, ...]
    saved: tuple[int, ...]
    differentiable: tuple[int, ...]
    seeded: bool


class RecordedCall:
    """Both entries.

    Numbers count the tensors of a call: first the inputs, then what is taken from around. Gradients
    are numbered as in `VjpPartition`.

    Attributes:
        parts: the two subprograms.
        results: the avals of the code's results, and of what it writes.
        residuals: the avals of what forward keeps for backward.
        saved: numbers of the tensors that backward needs.
        differentiable: numbers of the results that have a gradient.
        forward: takes the tensors (and last a seed, if seeded); gives the results and residuals.
        backward: takes the gradients of the differentiable results, the tensors `saved`, and the
            residuals; gives the gradients that `parts.wanted` names.
    """

    def __init__(self, shape: _CallKey, inputs: Sequence[Any], name: str):
        """See `call_of`."""
        self.parts, self.results, self.saved = shape.parts, shape.results, shape.saved
        self.differentiable = shape.differentiable
        forward, backward = shape.parts.forward, shape.parts.backward
        self._seeded, self._draws = shape.seeded, bool(forward.draws)
        draws = self._draws and not shape.seeded
        key = jax.eval_shape(lambda: jax.random.key(0)) if draws else None
        floats = [jax.ShapeDtypeStruct((), jnp.float64)] * len(forward.scalars)
        seed = [jax.ShapeDtypeStruct((), jnp.int32)] if shape.seeded else []
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            found = jax.eval_shape(self._forward, [*inputs, *seed], floats, key)
        self.residuals = [
            Aval.contiguous(tuple(one.shape), logical_dtype(one.dtype))
            for one in found[len(shape.results) :]
        ]
        lifted = len(forward.scalars)
        self.forward = Recipe(name, self._forward, len(found), random=draws, lifted=lifted)
        if backward is not None:
            self.backward = Recipe(
                f"gradient of {name}",
                self._backward,
                len(shape.parts.wanted),
                lifted=len(backward.scalars),
            )

    def _forward(self, arrays: Sequence[Any], scalars: Any, key: Any) -> list[Any]:
        if self._seeded:
            *arrays, seed = arrays
            key = jax.random.key(seed)
        found = self.parts.forward.run(arrays, scalars, key)
        if self.parts.backward is not None and self.parts.backward.draws:
            found.append(jax.random.key_data(key))
        return found

    def _backward(self, arrays: Sequence[Any], scalars: Any, _key: Any) -> list[Any]:
        piece = self.parts.backward
        assert piece is not None
        key = None
        if piece.draws:
            *arrays, data = arrays
            key = jax.random.wrap_key_data(data)
        found = iter(piece.run(arrays, scalars, key))
        return [
            next(found).astype(aval.physical) if has else jnp.zeros(*aval.token)
            for has, aval in zip(self.parts.has, self.parts.avals, strict=True)
        ]


def call_of(run: TracedVjp, name: str, *, wants: bool, seeded: bool) -> RecordedCall:
    """The entries for a recorded run; those of equal runs are one object.

    Args:
        run: some code.
        name: for reports.
        wants: whether a tensor that it is called with wants a gradient.
        seeded: whether its random numbers come from a seed that it is called with.
    """
    subtrace = run.subtrace
    wants = (wants or bool(subtrace.aliases)) and bool(run.differentiable)
    given = [*run.inputs, *subtrace.outside_slots(), *subtrace.constant_slots()]
    written = [*(slot for _, slot in run.written), *(slot for _, slot in run.changed)]
    parts = cut_both(run, given, [*run.results, *written], wants=wants)
    avals = [storage.aval for storage, _ in run.written]
    avals += [run.input_avals[number] for number, _ in run.changed]
    numbers = {slot: number for number, slot in enumerate(given)}
    shape = _CallKey(
        parts,
        (*run.avals, *avals),
        tuple([numbers[slot] for slot in parts.used]),
        tuple(run.differentiable) if wants else (),
        seeded,
    )
    found = _KNOWN.lookup(shape)
    if found is None:
        inputs = [jax.ShapeDtypeStruct(*subtrace.tokens[slot]) for slot in given]
        found = _KNOWN.intern(shape, RecordedCall(shape, inputs, name))
    return found


_KNOWN: Interned[_CallKey, RecordedCall] = Interned(PROGRAMS)
