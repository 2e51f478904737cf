"""A JAX function traced for operands: the tape entries of its calls, and their autograd nodes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import CopyError
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.caches import cached
from isoshard.core.runtime.shard_map_axes import (
    checked_axes,
    communicated,
    varying,
    varying_over,
)
from isoshard.torch_bridge.common.dtypes import logical_dtype
from isoshard.torch_bridge.engine.recording import deferred_checks, lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.recording.tape import Recipe
from isoshard.torch_bridge.engine.subprograms import subtrace
from isoshard.torch_bridge.engine.values.value import Aval
from isoshard.torch_bridge.layout.widths import jax_dtype

from .convert import wrap
from .flat_vjp import FlatVjp, hoisted
from .operand_types import Types, declare_sharding, typed_call
from .users_mesh import under_auto_axes


class TracedCall:
    """A function traced for operands like these.

    Attributes:
        vjp: the function and its VJP, in JAX.
        types: of the operands, or None.
        outs: the aval of each result.
        rest: the avals of the other residuals: those that are no operands or results.
        forward: takes the operands; gives the results and the rest.
        backward: takes the residuals and the gradients of the floating results; gives the
            gradients of the operands `vjp.argnums`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        avals: Sequence[Aval],
        needs_grad: Sequence[bool],
        name: str,
        types: Types | None,
        wide: bool,
        again: Callable[..., Callable[..., Any]],
    ):
        """Trace the function, and its VJP if a gradient is needed.

        Args:
            function: takes one array per operand; returns a pytree.
            avals: of the operands.
            needs_grad: for each operand, whether its gradient is computed.
            name: for messages and reports.
            types: of the operands, or None.
            wide: whether it computes in 64 bits where operands have them.
            again: makes a function of any tensors, as `TorchFunction`; of the VJP, so that
                gradients can be differentiated.
        """
        self._name, self.types, self._wide = name, types, wide
        self._avals, self.needs_grad = tuple(avals), tuple(needs_grad)
        self._again = again
        self._gradient: Callable[..., Any] | None = None
        kinds = [None] * len(avals) if types is None or types.untyped else types.shardings
        with jax.enable_x64(wide), under_auto_axes() if types is None else types.entered():
            shapes = [
                jax.ShapeDtypeStruct(aval.meta.size, self._jax_dtype_of(aval), sharding=kind)
                for aval, kind in zip(avals, kinds, strict=True)
            ]
            self._shapes, self._function = shapes, function
            self._by_axes: dict[frozenset[Any], FlatVjp] = {}
            axes = checked_axes()
            if axes:
                axes = communicated(self._vjp_over(axes).program)
                recorder = tapes.recorder()
                if isinstance(recorder, subtrace.SubTrace) and recorder.axes is not None:
                    recorder.axes |= axes
            self.vjp = vjp = self._vjp_over(axes)
        self.outs = [self._out_aval(aval) for aval in vjp.outs]
        self.rest = [self._out_aval(aval) for aval in vjp.rest]
        count = len(vjp.residual_positions)

        self._has_effects = bool(vjp.program.effects)

        def run(arrays: Any, _scalars: Any, _key: Any) -> Any:
            with jax.enable_x64(wide):
                vjp = self._vjp_over(axes.union(*map(varying, arrays)))
                results = self._call(vjp.forward, arrays, vjp.operands)
                return [*results, jnp.ones((), bool)] if self._has_effects else results

        def pull(arrays: Any, _scalars: Any, _key: Any) -> Any:
            with jax.enable_x64(wide):
                over = axes.union(*map(varying, arrays))
                vjp = self._vjp_over(over)
                cotangents = [varying_over(x, over) for x in arrays[count:]]
                gradients = lambda *operands: vjp.backward(operands[:count], operands[count:])  # noqa: E731
                return self._call(gradients, [*arrays[:count], *cotangents], vjp.backward_avals)

        count_of_all = len(self.outs) + len(self.rest) + self._has_effects
        self.forward = Recipe(name, run, count_of_all)
        self.backward = Recipe(f"gradient of {name}", pull, len(vjp.argnums))

    def __call__(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Record the call, in torch's graph if needed; returns the results, then the rest."""
        if any(self.needs_grad):
            return _JaxCall.apply(self, *tensors)
        return self.record(tensors)

    def _vjp_over(self, axes: frozenset[Any]) -> FlatVjp:
        """The function of operands that differ over some axes of a `jax.shard_map` around."""
        if axes not in self._by_axes:
            with under_auto_axes() if self.types is None else self.types.entered():
                shapes = [jax.eval_shape(lambda x: varying_over(x, axes), x) for x in self._shapes]
                needs_grad = self.needs_grad
                self._by_axes[axes] = FlatVjp(
                    self._function, shapes if axes else self._shapes, needs_grad
                )
        return self._by_axes[axes]

    def _call(self, function: Any, arrays: Sequence[Any], kinds: Sequence[Any]) -> Any:
        operands = []
        for x, kind in zip(arrays, kinds, strict=True):
            x = jax.lax.convert_element_type(x, jax_dtype(x.dtype))
            operands.append(varying_over(x, varying(kind)))
        if self.types is not None and not any(isinstance(operand, Tracer) for operand in operands):
            function = jax.jit(function)  # alone, its equations would find a mesh without devices
        return typed_call(function, operands, kinds, self.types)

    def with_operands(
        self, function: Callable[..., Any], differentiate: bool
    ) -> tuple[list[Any], TracedCall]:
        """Tensors of the tracers that it closes over, and the call with these as operands."""
        types = self.types
        with jax.enable_x64(self._wide), under_auto_axes() if types is None else types.entered():
            tracers, run = hoisted(function, self._shapes)
        tensors = subtrace.inside([wrap(tracer) for tracer in tracers])
        if types is not None and not types.untyped:
            more: list[Any] = [jax.typeof(tracer).sharding for tracer in tracers]
            types = Types(types.mesh, (*types.shardings, *more))
        avals = [*self._avals, *(tensor._aval for tensor in tensors)]
        needs_grad = [
            *self.needs_grad,
            *(differentiate and tensor.requires_grad for tensor in tensors),
        ]
        again = self._again
        return tensors, TracedCall(run, avals, needs_grad, self._name, types, self._wide, again)

    def _jax_dtype_of(self, aval: Aval) -> Any:
        """The dtype in which JAX computes with an operand."""
        dtype = jax_dtype(aval.physical)
        if dtype != aval.physical and not jnp.issubdtype(dtype, jnp.integer):
            raise TypeError(
                f"{self._name} is given {aval.meta.dtype}, and JAX computes in 32 bits while "
                "jax_enable_x64 is off; switch it on with "
                'jax.config.update("jax_enable_x64", True), or convert with .float()'
            )
        return dtype

    def _out_aval(self, aval: Any) -> Aval:
        try:
            return Aval.contiguous(tuple(aval.shape), logical_dtype(aval.dtype))
        except TypeError as error:
            raise TypeError(
                f"{self._name} gives a result that torch cannot hold: {error}"
            ) from None

    def record(self, tensors: Sequence[Any]) -> list[lazy_tensor.LazyTensor]:
        """Put the function on the tape; gives its results and the rest."""
        self._check_integers(tensors)
        values = tapes.recorder().record(
            self.forward, [lazy_tensor.read(tensor) for tensor in tensors]
        )
        if self._has_effects and isinstance(tapes.recorder(), tapes.Tape):
            deferred_checks.check(lazy_tensor.fresh(_FLAG, values[-1]), lambda _: None)
        results = [
            lazy_tensor.fresh(aval, value)
            for aval, value in zip((*self.outs, *self.rest), values, strict=False)
        ]
        for tensor, kind in zip(results, self._kinds(self.vjp.outs), strict=False):
            declare_sharding(tensor, kind)
        return results

    def _check_integers(self, tensors: Sequence[Any]) -> None:
        """Check integers that JAX stores in 32 bits, once their values are computed."""
        if not isinstance(tapes.recorder(), tapes.Tape):
            return
        for tensor, shape in zip(tensors, self._shapes, strict=True):
            dtype = tensor._aval.physical
            if dtype != shape.dtype:
                message = _TOO_LARGE.format(self._name, dtype, shape.dtype)
                fits = tapes.recorder().record(_fitting(shape.dtype), [lazy_tensor.read(tensor)])
                error_of = functools.partial(_overflow_error, message)
                deferred_checks.check(lazy_tensor.fresh(_FLAG, fits[0]), error_of)

    def _kinds(self, avals: Sequence[Any]) -> list[NamedSharding]:
        """The types of values on the user's mesh; empty if the function was traced without."""
        if self.types is None or self.types.untyped:
            return []
        mesh = self.types.mesh
        return [
            NamedSharding(mesh, P() if aval.sharding.mesh.empty else aval.sharding.spec)
            for aval in avals
        ]

    def gradient(self) -> Callable[..., Any]:
        """The VJP as a function of operands and gradients that can be differentiated."""
        if self._gradient is None:
            types, vjp = self.types, self.vjp
            if types is not None and not types.untyped:
                floating = self._kinds([vjp.outs[index] for index in vjp.floating])
                types = Types(types.mesh, (*types.shardings, *floating))
            name = f"gradient of {self._name}"
            wide = self._wide
            self._gradient = self._again(vjp.gradient, name, types=types or False, wide=wide)
        return self._gradient


_TOO_LARGE = (
    "{0} was given {1} values that do not fit in {2}, in which JAX computes while jax_enable_x64 "
    "is off: its results are wrong. Switch it on first: jax.config.update('jax_enable_x64', True)"
)


_FLAG = Aval.contiguous((), torch.bool)


def _overflow_error(message: str, fits: int) -> Exception | None:
    return None if fits else CopyError(message)


@cached(1024)
def _fitting(dtype: np.dtype) -> Recipe:
    """Computes whether integers fit in a dtype."""
    limits = np.iinfo(dtype)

    def run(arrays: Any, _scalars: Any, _key: Any) -> Any:
        return [jnp.all((arrays[0] >= limits.min) & (arrays[0] <= limits.max))]

    return Recipe(f"fits in {dtype}", run, 1)


class _JaxCall(torch.autograd.Function):
    """The function in torch's autograd graph."""

    @staticmethod
    def forward(ctx: Any, traced: TracedCall, *tensors: Any) -> tuple[Any, ...]:
        outputs = traced.record(tensors)
        results, rest = outputs[: len(traced.outs)], outputs[len(traced.outs) :]
        ctx.traced = traced
        ctx.width = len(tensors)
        available = [*tensors, *results, *rest]
        ctx.positions = [
            position
            for position in sorted({*traced.vjp.residual_positions})
            if position >= len(tensors)
        ]
        ctx.save_for_backward(*tensors, *(available[position] for position in ctx.positions))
        integers = set(range(len(results))) - set(traced.vjp.floating)
        ctx.mark_non_differentiable(*(results[index] for index in sorted(integers)))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        traced: TracedCall = ctx.traced
        saved = ctx.saved_tensors[: ctx.width]
        cotangents = [grads[index] for index in traced.vjp.floating]
        if torch.is_grad_enabled():
            gradients = traced.gradient()(list(saved), cotangents)
        else:
            available = dict(zip(ctx.positions, ctx.saved_tensors[ctx.width :], strict=True))
            available.update(enumerate(saved))
            inputs = [
                *(available[position] for position in traced.vjp.residual_positions),
                *cotangents,
            ]
            values = tapes.recorder().record(
                traced.backward, [lazy_tensor.read(tensor) for tensor in inputs]
            )
            gradients = [
                lazy_tensor.fresh(saved[index]._aval, value)
                for index, value in zip(traced.vjp.argnums, values, strict=True)
            ]
        input_grads: list[Any] = [None] * ctx.width
        for index, gradient in zip(traced.vjp.argnums, gradients, strict=True):
            input_grads[index] = gradient
        return (None, *input_grads)
