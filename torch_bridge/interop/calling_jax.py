"""A JAX function, called on torch tensors.

On the `jax` device the call is one entry of the tape, so it is compiled, partitioned and fused with
the torch operations around it, and autograd goes through it by `jax.vjp`:

>>> norm = torch_function(jnp.linalg.norm)
>>> x = torch.tensor([3.0, 4.0], device="jax", requires_grad=True)
>>> norm(x).backward()
>>> x.grad.cpu()
tensor([0.6000, 0.8000])

Arguments and results are pytrees (JAX's notion: dictionaries, tuples, dataclasses that JAX knows).
Tensors, `jax.Array`s, NumPy arrays and PRNG keys in them are inputs of the program; everything else
is a constant that the function is traced with, so a number that changes belongs into a tensor. The
function runs once for every new combination of shapes, dtypes and constants. Functions with
`jax.custom_vjp`, `shard_map`, Pallas kernels, integer arguments and results, and gradients of
gradients all work. A result's dtype is JAX's: while `jax_enable_x64` is off, integers are int32.

Plain CPU and CUDA tensors are computed at once, and so are DTensors of many processes, in every
rank: see `plain_tensors` beside this module and `isoshard.torch_bridge.dtensor.dtensor_function`.
All tensors of a call are on one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import CopyError
from isoshard.core.layout.leaf_paths import path_name
from isoshard.core.layout.spec import SpecLike
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.bounded import PROGRAMS, Bounded
from isoshard.core.runtime.shard_map_axes import (
    checked_axes,
    communicated,
    varying,
    varying_over,
)
from isoshard.torch_bridge import naming
from isoshard.torch_bridge.dtensor.dtensor_exchange import is_dtensor
from isoshard.torch_bridge.dtensor.dtensor_function import DistributedFunction
from isoshard.torch_bridge.dtypes import logical_dtype
from isoshard.torch_bridge.engine.operators.cpu_fallback import upload
from isoshard.torch_bridge.engine.recording import deferred_checks, lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.recording.memory_log import note_constant
from isoshard.torch_bridge.engine.recording.tape import Recipe
from isoshard.torch_bridge.engine.subprograms import subtrace
from isoshard.torch_bridge.engine.values.value import Aval, Value
from isoshard.torch_bridge.layout.widths import jax_dtype

from .convert import wrap
from .flat_vjp import Pulled, hoisted
from .jax_operands import TENSOR, of_operands, sorted_out, surroundings
from .operand_types import Types, explained, say, typed_call, types_of
from .plain_tensors import PlainFunction
from .reads import Reads
from .transformed_call import TransformedCall, is_transformed
from .users_mesh import under_auto_axes


class TorchFunction:
    """A function of torch tensors that a JAX function computes; see `torch_function`.

    Args:
        function: takes arrays.
        name: for error messages and reports.
        out_specs: as for `torch_function`.
        copy: likewise.
        types: of the operands; True reads them off their Explicit mesh, False traces under Auto.
        reads: whether what the function closes over may change, which traces it anew.
        wide: whether to compute in 64 bits where operands have them; None does as JAX is set.

    Attributes:
        name: as given.

    Example:
        >>> double = torch_function(lambda x: 2 * x, name="double")
        >>> double.name, double(torch.ones(2, device="jax")).tolist()
        ('double', [2.0, 2.0])
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        out_specs: SpecLike = None,
        copy: bool | None = None,
        *,
        types: bool | Types = False,
        wide: bool | None = None,
        reads: bool = False,
    ):
        """See the class."""
        self.name, self._types, self._wide = name, types, wide
        self.__wrapped__, self._out_specs = function, out_specs
        self._reads = Reads(function, name) if reads else None
        self._known: Bounded[Any, Any] = Bounded(PROGRAMS)
        self._distributed = DistributedFunction(function, name, out_specs, self._reads)
        self._plain = PlainFunction(function, name, copy, _of_gradient, self._reads)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record the call; on DTensors and plain tensors, compute it.

        Args:
            *args: the JAX function's arguments, with tensors for arrays: all on the `jax` device,
                or all on one other, or DTensors.
            **kwargs: likewise.

        Returns:
            The JAX function's result, with tensors for arrays.

        Raises:
            TypeError: tensors are on several devices, a constant cannot be hashed, or a result's
                dtype is unknown to torch.
            CopyError: plain tensors cannot be shared under copy=False.
            ShardingError: DTensors do not fit together, see
                `isoshard.torch_bridge.dtensor.dtensor_function`.
        """
        leaves, structure = jax.tree.flatten((args, kwargs))
        if any(map(_is_distributed, leaves)):
            return self._distributed(args, kwargs)
        if any(map(is_transformed, leaves)):
            return self._transformed(leaves, structure)
        self._distributed.pass_by()
        if self._out_specs is not None:
            raise TypeError(
                f"{self.name} has out_specs, which are for DTensors; lay results on the jax device "
                "out with isoshard.torch_bridge.mark_sharding"
            )
        plain = [leaf for leaf in leaves if _is_plain(leaf)]
        if plain and not tapes.is_tracing():
            self._check_devices(leaves)
            return self._plain(leaves, structure)
        tensors: list[lazy_tensor.LazyTensor] = []
        fixed = []
        for leaf in leaves:
            fixed.append(self._take(leaf, tensors))
        tensors = subtrace.inside(tensors)
        differentiate = torch.is_grad_enabled()
        wanted = tuple([differentiate and tensor.requires_grad for tensor in tensors])
        avals = tuple([tensor._aval for tensor in tensors])
        types: Any = self._types or None
        if types is True:
            types = types_of(tensors, self.name, lambda: _names(args, kwargs))
        wide = bool(jax.config.read("jax_enable_x64")) if self._wide is None else self._wide
        version = self._reads and self._reads.version()
        key = (structure, tuple(fixed), avals, wanted, types, wide, version, *surroundings())
        try:
            traced = self._known.get(key)
        except TypeError as error:
            raise TypeError(
                f"{self.name} takes tensors, arrays and hashable constants: {error}"
            ) from None
        if traced is None:
            function = of_operands(self.__wrapped__, structure, fixed)
            around: list[Any] = []
            try:
                with self._reads.tracing() if self._reads else nullcontext():
                    traced = _Traced(function, avals, wanted, self.name, types, wide)
                if traced.pulled.holds_tracers and subtrace.is_recording():
                    around, traced = traced.with_operands(function, differentiate)
                    tensors, wanted = [*tensors, *around], (*wanted, *traced.wanted[len(wanted) :])
            except Exception as error:
                found = explained(error, types, _names(args, kwargs), self.name)
                if any(wanted):
                    found.add_note(_NO_GRADIENT.format(self.name))
                if found is error:
                    raise
                raise found from None
            if not (around or traced.pulled.holds_tracers):
                self._known[key] = traced
        results = _JaxCall.apply(traced, *tensors) if any(wanted) else traced.record(tensors)
        return jax.tree.unflatten(traced.pulled.structure, results[: len(traced.outs)])

    def _transformed(self, leaves: Sequence[Any], structure: Any) -> Any:
        """Call it under transformations of `torch.func`."""
        tensors: list[torch.Tensor] = []
        fixed = []
        for leaf in leaves:
            kind, array = (TENSOR, None) if isinstance(leaf, torch.Tensor) else sorted_out(leaf)
            fixed.append(kind)
            if array is not None:
                tensors.append(_tensor_of(array))
            elif kind is TENSOR:
                tensors.append(leaf)
        key = ("torch.func", structure, tuple(fixed), *surroundings())
        call = self._known.get(key)
        if call is None:
            wrapped = functools.partial(TorchFunction, types=True, reads=self._reads is not None)
            function = of_operands(self.__wrapped__, structure, fixed)
            call = self._known[key] = TransformedCall(function, self.name, wrapped)
        return call(*tensors)

    def _take(self, leaf: Any, tensors: list[lazy_tensor.LazyTensor]) -> Any:
        """Put an array or tensor among the operands; returns what is fixed of the argument."""
        if isinstance(leaf, lazy_tensor.LazyTensor):
            tensors.append(leaf)
            return TENSOR
        if isinstance(leaf, torch.Tensor):  # a constant of the trace
            tensors.append(upload(leaf.detach().cpu()))
            return TENSOR
        kind, array = sorted_out(leaf)
        if array is not None:
            tensors.append(_tensor_of(array))
        return kind

    def _check_devices(self, leaves: Sequence[Any]) -> None:
        """Refuse tensors of several devices, and such as have no values."""
        found: dict[torch.device, tuple[int, ...]] = {}
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                found.setdefault(leaf.device, tuple(leaf.shape))
        where = ", ".join(f"{device} (shape {shape})" for device, shape in found.items())
        if len(found) > 1:
            raise TypeError(
                f"{self.name} got tensors on several devices: {where}; move them to one, such as "
                f"with {naming.moving()}"
            )
        if "meta" in where:
            raise TypeError(
                f"{self.name} got tensors without values: {where}; for shapes alone, use "
                "jax.eval_shape on the JAX function"
            )


def torch_function(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    out_specs: SpecLike = None,
    copy: bool | None = None,
) -> TorchFunction:
    """Make a JAX function callable on torch tensors.

    Args:
        function: pure, and traceable by `jax.jit`.
        name: for error messages and reports; the function's own name if not given.
        out_specs: of results that are DTensors, their layouts: a PartitionSpec, a list of
            placements, or None for the compiler's choice; or a tree of those that begins as the
            tree of results does.
        copy: of arguments that are plain CPU or CUDA tensors: None shares their memory where it
            can and copies where it must, which is counted; False raises instead; True copies.
            Tensors on the `jax` device cross as they are.

    Returns:
        A callable. Keep it: it remembers what it has traced.

    Raises:
        TypeError: `function` cannot be called.

    Example:
        >>> sums = torch_function(lambda tree, axis: jax.tree.map(lambda x: x.sum(axis), tree))
        >>> sums({"w": torch.ones(2, 3, device="jax")}, axis=0)["w"].tolist()
        [2.0, 2.0, 2.0]
    """
    if not callable(function):
        raise TypeError(
            f"torch_function takes a function of JAX arrays, not {type(function).__name__}; an "
            "array becomes a tensor with iso.to_torch"
        )
    called = name or getattr(function, "__name__", None) or type(function).__name__
    return TorchFunction(function, called, out_specs, copy, types=True, reads=True)


def _of_gradient(function: Callable[..., Any], name: str) -> TorchFunction:
    return TorchFunction(function, name, types=True)


def _names(args: Any, kwargs: Any) -> list[str]:
    """Of the operands: of positional arguments by number."""
    named = [(f"argument {path_name(path)}", x) for path, x in jax.tree.leaves_with_path(args)]
    named += [(path_name(path), x) for path, x in jax.tree.leaves_with_path(kwargs)]
    return [
        name
        for name, leaf in named
        if isinstance(leaf, torch.Tensor) or sorted_out(leaf)[1] is not None
    ]


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, lazy_tensor.LazyTensor)


def _is_distributed(leaf: Any) -> bool:
    """Whether an argument is a DTensor, or a module that has one."""
    if isinstance(leaf, torch.nn.Module):
        return any(map(is_dtensor, leaf.parameters()))
    return is_dtensor(leaf)


def _tensor_of(array: Any) -> lazy_tensor.LazyTensor:
    value = Value.of(jnp.asarray(array), shared=True)
    aval = Aval.contiguous(tuple(array.shape), logical_dtype(value.array.dtype))
    tensor = lazy_tensor.fresh(aval, value)
    note_constant(value)
    return tensor


class _Traced:
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
    ):
        """Trace the function, and its VJP if a gradient is wanted."""
        self._name, self.types, self._wide = name, types, wide
        self._avals, self.wanted = tuple(avals), tuple(wanted)
        self._gradient: TorchFunction | None = None
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
    ) -> tuple[list[Any], _Traced]:
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
        return tensors, _Traced(run, avals, wanted, self._name, types, self._wide)

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

    def gradient(self) -> TorchFunction:
        """The VJP as a function of operands and gradients that can be differentiated."""
        if self._gradient is None:
            types, pulled = self.types, self.pulled
            if types is not None and not types.untold:
                floating = self._kinds([pulled.outs[number] for number in pulled.floating])
                types = Types(types.mesh, (*types.shardings, *floating))
            name = f"gradient of {self._name}"
            wide = self._wide
            self._gradient = TorchFunction(pulled.gradient, name, types=types or False, wide=wide)
        return self._gradient


_NO_GRADIENT = (
    "An argument of {} requires a gradient, so its VJP was traced too. Where the function has "
    "none, call it under torch.no_grad(), or with x.detach()."
)
_TOO_LARGE = (
    "{0} was given {1} values that do not fit in {2}, in which JAX computes while jax_enable_x64 "
    "is off: its results are wrong. Switch it on first: jax.config.update('jax_enable_x64', True)"
)


_FLAG = Aval.contiguous((), torch.bool)


def _cut_error(message: str, fits: int) -> Exception | None:
    return None if fits else CopyError(message)


@functools.cache
def _fitting(dtype: np.dtype) -> Recipe:
    """Computes whether integers fit in a dtype."""
    limits = np.iinfo(dtype)

    def run(arrays: Any, _scalars: Any, _key: Any) -> Any:
        return [jnp.all((arrays[0] >= limits.min) & (arrays[0] <= limits.max))]

    return Recipe(f"fits in {dtype}", run, 1)


class _JaxCall(torch.autograd.Function):
    """The function in torch's autograd graph."""

    @staticmethod
    def forward(ctx: Any, traced: _Traced, *tensors: Any) -> tuple[Any, ...]:
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
        traced: _Traced = ctx.traced
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
