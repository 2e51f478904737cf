"""A recorded run as two subprograms: a function and its VJP."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from isoshard.torch_bridge.engine.values.value import Aval

from .subprogram import Subprogram, extract, needed_slots
from .traced_vjp import TracedVjp, aval_of


@dataclasses.dataclass(frozen=True)
class VjpPartition:
    """The two subprograms of a run.

    Attributes:
        forward: returns the results, and then the residuals.
        backward: takes the gradients of the differentiable results, the inputs `used`, and the
            residuals; returns the gradients of what is `differentiated`, where it `has` one. None
            if no gradient is needed.
        used: slots of the inputs that backward takes.
        residuals: slots of the residuals.
        differentiated: what has a gradient: indices of inputs, and of aliases after them.
        has: whether the code's results depend on each of those.
        avals: of the gradients.
    """

    forward: Subprogram
    backward: Subprogram | None
    used: tuple[int, ...] = dataclasses.field(compare=False)
    residuals: tuple[int, ...] = dataclasses.field(compare=False)
    differentiated: tuple[int, ...]
    has: tuple[bool, ...]
    avals: tuple[Aval, ...]

    def run_forward(self, arrays: Sequence[Any], scalars: Any, key: Any) -> list[Any]:
        """The results and the residuals, a key among them if backward draws; while JAX traces."""
        outputs = self.forward.run(arrays, scalars, key)
        if self.backward is not None and self.backward.draws:
            outputs.append(jax.random.key_data(key))
        return outputs

    def run_backward(self, arrays: Sequence[Any], scalars: Any) -> list[Any]:
        """A gradient for all of `differentiated`, zeros where it has none; while JAX traces."""
        assert self.backward is not None
        key = None
        if self.backward.draws:
            *arrays, data = arrays
            key = jax.random.wrap_key_data(data)
        grads = iter(self.backward.run(arrays, scalars, key))
        return [
            next(grads).astype(aval.physical) if has else jnp.zeros(*aval.token)
            for has, aval in zip(self.has, self.avals, strict=True)
        ]


def partition_vjp(
    run: TracedVjp,
    inputs: Sequence[int],
    results: Sequence[int],
    each: Sequence[int] = (),
    *,
    wants: bool,
    recompute: bool = False,
) -> VjpPartition:
    """Split a run into two subprograms.

    Args:
        run: code and its gradient.
        inputs: slots of the inputs of forward.
        results: slots of its results.
        each: those of `inputs` that are residuals, as they are gone when backward runs.
        wants: whether a tensor that the code is called with requires a gradient.
        recompute: whether backward recomputes what it can, instead of having residuals kept.
    """
    if not (wants or run.subtrace.aliases) or not run.differentiable:
        return VjpPartition(extract(run.subtrace, inputs, results), None, (), (), (), (), ())
    slots, differentiated, avals = [], [], []
    aliases = [alias for _, alias in run.subtrace.aliases]
    for index, slot in enumerate(run.gradients):
        if index >= len(run.inputs):
            avals.append(aval_of(aliases[index - len(run.inputs)]))
        elif run.needs_grad[index]:
            avals.append(run.input_avals[index])
        else:
            continue
        differentiated.append(index)
        slots.append(slot)
    grad_slots = [slot for slot in slots if slot is not None]
    boundary = 0 if recompute else run.border
    taken, residuals = needed_slots(run.subtrace, grad_slots, [*inputs, *run.cotangents], boundary)
    used = [slot for slot in taken if slot in inputs and slot not in each]
    residuals = [*(slot for slot in taken if slot in each), *residuals]
    return VjpPartition(
        extract(run.subtrace, inputs, [*results, *residuals]),
        extract(run.subtrace, [*run.cotangents, *used, *residuals], grad_slots),
        tuple(used),
        tuple(residuals),
        tuple(differentiated),
        tuple([slot is not None for slot in slots]),
        tuple(avals),
    )
