"""A JAX function traced for operands: what its calls put on the tape, and in torch's graph."""

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
from .flat_vjp import Pulled, hoisted
from .operand_types import Types, say, typed_call
from .users_mesh import under_auto_axes


class TracedCall:
    """A function traced for operands like these.

    Attributes:
        pulled: the function and its VJP, in JAX.
        types: of the operands, or None.
        outs: the aval of each result.
        rest: the avals of the other residuals: those that are no operands or results.
        forward: takes the operands; gives the results and the rest.
        backward: takes what `pulled.kept` names and the gradients of the floating results; gives
            the gradients of the wanted operands.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        avals: Sequence[Aval],
        wanted: Sequence[bool],
        name: str,
        types: Types | None,
        wide: bool,
        again: Callable[..., Callable[..., Any]],
    ):
        """Trace the function, and its VJP if a gradient is wanted.

        Args:
            function: takes one array per operand; returns a pytree.
            avals: of the operands.
            wanted: for each operand, whether its gradient is.
            name: for messages and reports.
            types: of the operands, or None.
            wide: whether it computes in 64 bits where operands have them.
            again: makes a function of any tensors, as `TorchFunction`; of the VJP, so that
                gradients can be differentiated.
        """
        self._name, self.types, self._wide = name, types, wide
        self._avals, self.wanted = tuple(avals), tuple(wanted)
        self._again = again
        self._gradient: Callable[..., Any] | None = None
        kinds = [None] * len(avals) if types is None or types.untold else types.shardings
        with jax.enable_x64(wide), under_auto_axes() if types is None else types.entered():
            shapes = [
                jax.ShapeDtypeStruct(aval.meta.size, self._taken(aval), sharding=kind)
                for aval, kind in zip(avals, kinds, strict=True)
            ]
            self._shapes, self._function = shapes, function
            self._by_axes: dict[frozenset[Any], Pulled] = {}
            axes = checked_axes()
            if axes:
                axes = communicated(self._pulled(axes).program)
                here = tapes.recorder()
                if isinstance(here, subtrace.SubTrace) and here.axes is not None:
                    here.axes |= axes
            self.pulled = pulled = self._pulled(axes)
        self.outs = [self._out_aval(aval) for aval in pulled.outs]
        self.rest = [self._out_aval(aval) for aval in pulled.rest]
        count = len(pulled.kept)

        self._has_effects = bool(pulled.program.effects)

        def run(arrays: Any, _scalars: Any, _key: Any) -> Any:
            with jax.enable_x64(wide):
                pulled = self._pulled(axes.union(*map(varying, arrays)))
                found = self._call(pulled.forward, arrays, pulled.operands)
                return [*found, jnp.ones((), bool)] if self._has_effects else found

        def pull(arrays: Any, _scalars: Any, _key: Any) -> Any:
            with jax.enable_x64(wide):
                over = axes.union(*map(varying, arrays))
                pulled = self._pulled(over)
                slopes = [varying_over(x, over) for x in arrays[count:]]
                gradients = lambda *given: pulled.backward(given[:count], given[count:])  # noqa: E731
                return self._call(gradients, [*arrays[:count], *slopes], pulled.pulled)

        count_of_all = len(self.outs) + len(self.rest) + self._has_effects
        self.forward = Recipe(name, run, count_of_all)
        self.backward = Recipe(f"gradient of {name}", pull, len(pulled.wanted))

    def __call__(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Record the call, in torch's graph if a gradient is wanted.

        Args:
            tensors: the operands.

        Returns:
            The results, and others after them.
        """
        if any(self.wanted):
            return _JaxCall.apply(self, *tensors)
        return self.record(tensors)

    def _pulled(self, axes: frozenset[Any]) -> Pulled:
        """The function of operands that differ over some axes of a `jax.shard_map` around."""
        if axes not in self._by_axes:
            with under_auto_axes() if self.types is None else self.types.entered():
                shapes = [jax.eval_shape(lambda x: varying_over(x, axes), x) for x in self._shapes]
                wanted = self.wanted
                self._by_axes[axes] = Pulled(
                    self._function, shapes if axes else self._shapes, wanted
                )
        return self._by_axes[axes]

    def _call(self, function: Any, arrays: Sequence[Any], kinds: Sequence[Any]) -> Any:
        given = []
        for x, kind in zip(arrays, kinds, strict=True):
            x = jax.lax.convert_element_type(x, jax_dtype(x.dtype))
            given.append(varying_over(x, varying(kind)))
        if self.types is not None and not any(isinstance(one, Tracer) for one in given):
            function = jax.jit(function)  # alone, its equations would find a mesh without devices
        return typed_call(function, given, kinds, self.types)

    def with_operands(
        self, function: Callable[..., Any], differentiate: bool
    ) -> tuple[list[Any], TracedCall]:
        """The same with what it closes over of a trace around it as further operands.

        Args:
            function: as given before.
            differentiate: whether gradients are wanted.

        Returns:
            Tensors of those values, and the function.
        """
        types = self.types
        with jax.enable_x64(self._wide), under_auto_axes() if types is None else types.entered():
            tracers, run = hoisted(function, self._shapes)
        tensors = subtrace.inside([wrap(one) for one in tracers])
        if types is not None and not types.untold:
            more: list[Any] = [jax.typeof(one).sharding for one in tracers]
            types = Types(types.mesh, (*types.shardings, *more))
        avals = [*self._avals, *(tensor._aval for tensor in tensors)]
        wanted = [*self.wanted, *(differentiate and one.requires_grad for one in tensors)]
        again = self._again
        return tensors, TracedCall(run, avals, wanted, self._name, types, self._wide, again)

    def _taken(self, aval: Aval) -> Any:
        """The dtype in which JAX computes with an operand."""
        found = jax_dtype(aval.physical)
        if found != aval.physical and not jnp.issubdtype(found, jnp.integer):
            raise TypeError(
                f"{self._name} is given {aval.meta.dtype}, and JAX computes in 32 bits while "
                "jax_enable_x64 is off; switch it on with "
                'jax.config.update("jax_enable_x64", True), or convert with .float()'
            )
        return found

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
        made = [
            lazy_tensor.fresh(aval, value)
            for aval, value in zip((*self.outs, *self.rest), values, strict=False)
        ]
        for tensor, kind in zip(made, self._kinds(self.pulled.outs), strict=False):
            say(tensor, kind)
        return made

    def _check_integers(self, tensors: Sequence[Any]) -> None:
        """Let integers be checked that JAX takes in 32 bits, once their values are known."""
        if not isinstance(tapes.recorder(), tapes.Tape):
            return
        for tensor, shape in zip(tensors, self._shapes, strict=True):
            given = tensor._aval.physical
            if given != shape.dtype:
                message = _TOO_LARGE.format(self._name, given, shape.dtype)
                found = tapes.recorder().record(_fitting(shape.dtype), [lazy_tensor.read(tensor)])
                fault = functools.partial(_cut_error, message)
                deferred_checks.check(lazy_tensor.fresh(_FLAG, found[0]), fault)

    def _kinds(self, avals: Sequence[Any]) -> list[NamedSharding]:
        """The types of values on the user's mesh; nothing if the function was traced without."""
        if self.types is None or self.types.untold:
            return []
        mesh = self.types.mesh
        return [
            NamedSharding(mesh, P() if aval.sharding.mesh.empty else aval.sharding.spec)
            for aval in avals
        ]

    def gradient(self) -> Callable[..., Any]:
        """The VJP as a function of operands and gradients that can be differentiated."""
        if self._gradient is None:
            types, pulled = self.types, self.pulled
            if types is not None and not types.untold:
                floating = self._kinds([pulled.outs[number] for number in pulled.floating])
                types = Types(types.mesh, (*types.shardings, *floating))
            name = f"gradient of {self._name}"
            wide = self._wide
            self._gradient = self._again(pulled.gradient, name, types=types or False, wide=wide)
        return self._gradient


_TOO_LARGE = (
    "{0} was given {1} values that do not fit in {2}, in which JAX computes while jax_enable_x64 "
    "is off: its results are wrong. Switch it on first: jax.config.update('jax_enable_x64', True)"
)


_FLAG = Aval.contiguous((), torch.bool)


def _cut_error(message: str, fits: int) -> Exception | None:
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
        found = [*tensors, *results, *rest]
        ctx.kept = [place for place in sorted({*traced.pulled.kept}) if place >= len(tensors)]
        ctx.save_for_backward(*tensors, *(found[place] for place in ctx.kept))
        integers = set(range(len(results))) - set(traced.pulled.floating)
        ctx.mark_non_differentiable(*(results[number] for number in sorted(integers)))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        traced: TracedCall = ctx.traced
        saved = ctx.saved_tensors[: ctx.width]
        given = [grads[number] for number in traced.pulled.floating]
        if torch.is_grad_enabled():
            found = traced.gradient()(list(saved), given)
        else:
            places = dict(zip(ctx.kept, ctx.saved_tensors[ctx.width :], strict=True))
            places.update(enumerate(saved))
            inputs = [*(places[place] for place in traced.pulled.kept), *given]
            values = tapes.recorder().record(
                traced.backward, [lazy_tensor.read(one) for one in inputs]
            )
            found = [
                lazy_tensor.fresh(saved[number]._aval, value)
                for number, value in zip(traced.pulled.wanted, values, strict=True)
            ]
        result: list[Any] = [None] * ctx.width
        for number, gradient in zip(traced.pulled.wanted, found, strict=True):
            result[number] = gradient
        return (None, *result)
