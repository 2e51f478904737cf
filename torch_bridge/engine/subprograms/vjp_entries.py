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

    Indices count the tensors of a call: first the inputs, then tensors from around that require a
    gradient, and last what is taken from around.

    Attributes:
        partition: the two subprograms.
        results: the avals of the code's results, and of what it writes.
        saved: numbers of the tensors that backward needs.
        differentiable: numbers of the results that have a gradient.
    """

    partition: VjpPartition
    results: tuple[Aval, ...]
    saved: tuple[int, ...]
    differentiable: tuple[int, ...]


class VjpEntries:
    """Both entries.

    Attributes:
        key: see `EntriesKey`.
        results: the avals of the results, and of what is written.
        gradients: the avals of the gradients that `key.partition.differentiated` names.
        residuals: the avals of what forward keeps for backward.
        forward: takes the inputs and what is taken from around; gives the results, what is written,
            and the residuals.
        backward: takes the gradients of the differentiable results, the tensors saved, and the
            residuals; returns `gradients`. None if none is needed.
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
        forward, backward = key.partition.forward, key.partition.backward
        rng = jax.eval_shape(lambda: jax.random.key(0)) if draws else None
        floats = [jax.ShapeDtypeStruct((), jnp.float64)] * len(forward.scalars)
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            structs = jax.eval_shape(self._forward, inputs, floats, rng)
        self.residuals = [
            Aval.contiguous(tuple(residual.shape), logical_dtype(residual.dtype))
            for residual in structs[len(results) :]
        ]
        lifted = len(forward.scalars)
        self.forward = Recipe(names[0], self._forward, len(structs), random=draws, lifted=lifted)
        self.backward = None
        if backward is not None:
            lifted = len(backward.scalars)
            self.backward = Recipe(names[1], self._backward, len(gradients), lifted=lifted)

    def _forward(self, arrays: Sequence[Any], scalars: Any, key: Any) -> list[Any]:
        return self.key.partition.run_forward(arrays, scalars, key)

    def _backward(self, arrays: Sequence[Any], scalars: Any, _key: Any) -> list[Any]:
        return self.key.partition.run_backward(arrays, scalars)

    def call(
        self, node: type[VjpNode], closed: ClosedOver, inputs: Sequence[Any], *last: Any
    ) -> Sequence[Any]:
        """Record a call; what the code writes to is not written yet.

        Args:
            node: what it is in torch's graph.
            closed: what is taken from around.
            inputs: a tensor for each input.
            *last: tensors that `forward` takes behind those from around.
        """
        around = [*closed.tensors(), *last]
        if self.key.differentiable:
            originals = subtrace.inside(closed.originals)
            results = node.apply(self, closed, len(inputs), *inputs, *originals, *around)
        else:
            results = self.record(
                closed, [lazy_tensor.read(tensor) for tensor in (*inputs, *around)]
            )
        return results

    def record(self, closed: ClosedOver, values: Sequence[Any]) -> list[Any]:
        """Record `forward`; gives tensors, the residuals among them."""
        outputs = recorder().record(self.forward, values, closed.floats(self.key.partition.forward))
        avals = [*self.results, *self.residuals]
        return [lazy_tensor.fresh(aval, value) for aval, value in zip(avals, outputs, strict=True)]


class VjpNode(torch.autograd.Function):
    """A recorded function in torch's graph; each kind of function has a class of its own.

    Attributes:
        refusal: the error of gradients of gradients.
    """

    refusal: str

    @staticmethod
    def forward(
        ctx: Any, entries: VjpEntries, closed: ClosedOver, inputs: int, *tensors: Any
    ) -> tuple[Any, ...]:
        """Record the function; see `VjpEntries.call`."""
        values = [lazy_tensor.read(tensor) for tensor in tensors]
        inputs_read = [*values[:inputs], *values[inputs + len(closed.originals) :]]
        outputs, count = entries.record(closed, inputs_read), len(entries.results)
        ctx.entries, ctx.width = entries, len(tensors)
        ctx.floats = closed.floats(entries.key.partition.backward)
        # A tensor that needs no gradient may be written to before backward.
        candidates = [
            tensor if tensor.requires_grad else lazy_tensor.fresh(tensor._aval, value)
            for tensor, value in zip(tensors, values, strict=True)
        ]
        ctx.save_for_backward(*(candidates[index] for index in entries.key.saved), *outputs[count:])
        gradients = set(entries.key.differentiable)
        ctx.mark_non_differentiable(
            *[t for n, t in enumerate(outputs[:count]) if n not in gradients]
        )
        return tuple(outputs[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Record the VJP."""
        if torch.is_grad_enabled():
            raise RuntimeError(function_of(type(ctx)).refusal)
        entries: VjpEntries = ctx.entries
        assert entries.backward is not None
        operands = [*(grads[index] for index in entries.key.differentiable), *ctx.saved_tensors]
        values = [lazy_tensor.read(tensor) for tensor in operands]
        gradients = recorder().record(entries.backward, values, ctx.floats)
        result: list[Any] = [None] * ctx.width
        inputs = entries.key.partition.differentiated
        for index, aval, value in zip(inputs, entries.gradients, gradients, strict=True):
            result[index] = lazy_tensor.fresh(aval, value)
        return (None, None, None, *result)


def saved_indices(
    run: TracedVjp, partition: VjpPartition, around: Sequence[int]
) -> tuple[int, ...]:
    """Numbers of the tensors that backward needs; see `EntriesKey`."""
    first = len(run.inputs) + len(run.subtrace.aliases)
    index_of = {slot: index for index, slot in enumerate(run.inputs)}
    index_of |= {slot: first + index for index, slot in enumerate(around)}
    return tuple([index_of[slot] for slot in partition.used])
