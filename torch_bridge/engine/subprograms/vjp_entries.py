"""A recorded function and its VJP: two entries of a program, and one node of torch's graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from isoshard.torch_bridge._torch_internals.tensor_fields import function_of
from isoshard.torch_bridge.common.dtypes import logical_dtype
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.recipes import Recipe
from isoshard.torch_bridge.engine.recording.recorder import recorder
from isoshard.torch_bridge.engine.values.value import Aval

from . import subtrace
from .closed_over import ClosedOver
from .traced_vjp import TracedVjp
from .vjp_partition import VjpPartition


@dataclasses.dataclass(frozen=True)
class EntriesKey:
    """What makes the entries of two runs the same.

    Numbers count the tensors of a call: first the inputs, then tensors from around that want a
    gradient, and last what is taken from around.

    Attributes:
        parts: the two subprograms.
        results: the avals of the code's results, and of what it writes.
        saved: numbers of the tensors that backward needs.
        differentiable: numbers of the results that have a gradient.
    """

    parts: VjpPartition
    results: tuple[Aval, ...]
    saved: tuple[int, ...]
    differentiable: tuple[int, ...]


class VjpEntries:
    """Both entries.

    Attributes:
        key: see `EntriesKey`.
        results: the avals of the results, and of what is written.
        gradients: the avals of the gradients that `key.parts.wanted` names.
        residuals: the avals of what forward keeps for backward.
        forward: takes the inputs and what is taken from around; gives the results, what is written,
            and the residuals.
        backward: takes the gradients of the differentiable results, the tensors saved, and the
            residuals; gives `gradients`. None if none is wanted.
    """

    def __init__(
        self,
        key: EntriesKey,
        inputs: Sequence[Any],
        names: tuple[str, str],
        results: Sequence[Aval],
        gradients: Sequence[Aval],
        *,
        draws: bool,
    ):
        """Make the recipes.

        Args:
            key: see the class.
            inputs: shape and dtype of each array that `forward` takes.
            names: of the entries, for reports.
            results: see the class.
            gradients: likewise.
            draws: whether `forward` takes a key.
        """
        self.key, self.results, self.gradients = key, results, gradients
        forward, backward = key.parts.forward, key.parts.backward
        rng = jax.eval_shape(lambda: jax.random.key(0)) if draws else None
        floats = [jax.ShapeDtypeStruct((), jnp.float64)] * len(forward.scalars)
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            found = jax.eval_shape(self._forward, inputs, floats, rng)
        self.residuals = [
            Aval.contiguous(tuple(one.shape), logical_dtype(one.dtype))
            for one in found[len(results) :]
        ]
        lifted = len(forward.scalars)
        self.forward = Recipe(names[0], self._forward, len(found), random=draws, lifted=lifted)
        self.backward = None
        if backward is not None:
            lifted = len(backward.scalars)
            self.backward = Recipe(names[1], self._backward, len(gradients), lifted=lifted)

    def _forward(self, arrays: Sequence[Any], scalars: Any, key: Any) -> list[Any]:
        return self.key.parts.run_forward(arrays, scalars, key)

    def _backward(self, arrays: Sequence[Any], scalars: Any, _key: Any) -> list[Any]:
        return self.key.parts.run_backward(arrays, scalars)

    def call(
        self, node: type[VjpNode], closed: ClosedOver, inputs: Sequence[Any], *last: Any
    ) -> Sequence[Any]:
        """Record a call; what the code writes to is not written yet.

        Args:
            node: what it is in torch's graph.
            closed: what is taken from around.
            inputs: a tensor for each input.
            *last: tensors that `forward` takes behind those from around.

        Returns:
            A tensor for each of `results`.
        """
        around = [*closed.tensors(), *last]
        if self.key.differentiable:
            originals = subtrace.inside(closed.originals)
            found = node.apply(self, closed, len(inputs), *inputs, *originals, *around)
        else:
            found = self.record(closed, [lazy_tensor.read(one) for one in (*inputs, *around)])
        return found

    def record(self, closed: ClosedOver, values: Sequence[Any]) -> list[Any]:
        """Record `forward`; gives tensors, the residuals among them."""
        outputs = recorder().record(self.forward, values, closed.floats(self.key.parts.forward))
        avals = [*self.results, *self.residuals]
        return [lazy_tensor.fresh(aval, value) for aval, value in zip(avals, outputs, strict=True)]


class VjpNode(torch.autograd.Function):
    """A recorded function in torch's graph; each kind of function has a class of its own.

    Attributes:
        refusal: what gradients of gradients are refused with.
    """

    refusal: str

    @staticmethod
    def forward(
        ctx: Any, entries: VjpEntries, closed: ClosedOver, inputs: int, *tensors: Any
    ) -> tuple[Any, ...]:
        """Record the function; see `VjpEntries.call`."""
        values = [lazy_tensor.read(tensor) for tensor in tensors]
        given = [*values[:inputs], *values[inputs + len(closed.originals) :]]
        made, count = entries.record(closed, given), len(entries.results)
        ctx.entries, ctx.width = entries, len(tensors)
        ctx.floats = closed.floats(entries.key.parts.backward)
        # A tensor that needs no gradient may be written to before backward.
        kept = [
            tensor if tensor.requires_grad else lazy_tensor.fresh(tensor._aval, value)
            for tensor, value in zip(tensors, values, strict=True)
        ]
        ctx.save_for_backward(*(kept[number] for number in entries.key.saved), *made[count:])
        gradients = set(entries.key.differentiable)
        ctx.mark_non_differentiable(*[t for n, t in enumerate(made[:count]) if n not in gradients])
        return tuple(made[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Record the VJP."""
        if torch.is_grad_enabled():
            raise RuntimeError(function_of(type(ctx)).refusal)
        entries: VjpEntries = ctx.entries
        assert entries.backward is not None
        given = [*(grads[number] for number in entries.key.differentiable), *ctx.saved_tensors]
        values = [lazy_tensor.read(tensor) for tensor in given]
        found = recorder().record(entries.backward, values, ctx.floats)
        result: list[Any] = [None] * ctx.width
        wanted = entries.key.parts.wanted
        for number, aval, value in zip(wanted, entries.gradients, found, strict=True):
            result[number] = lazy_tensor.fresh(aval, value)
        return (None, None, None, *result)


def saved_numbers(run: TracedVjp, parts: VjpPartition, around: Sequence[int]) -> tuple[int, ...]:
    """Numbers of the tensors that backward needs; see `EntriesKey`.

    Args:
        run: some code.
        parts: what was cut from it.
        around: slots of what it takes from around.
    """
    first = len(run.inputs) + len(run.subtrace.aliases)
    numbers = {slot: number for number, slot in enumerate(run.inputs)}
    numbers |= {slot: first + number for number, slot in enumerate(around)}
    return tuple([numbers[slot] for slot in parts.used])
