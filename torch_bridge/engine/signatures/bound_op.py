"""One operator call with everything but its array values fixed.

The engine sees the same calls again and again. A `BoundOp` is what can be worked out once and kept:
which lowering computes it, what shapes, strides and dtypes torch promises for its results, and
which dtype its operands are promoted to.

>>> import torch
>>> from isoshard.torch_bridge import lowerings
>>> from isoshard.torch_bridge.engine.signatures.shape_inference import infer
>>> x = Meta((2, 3), (3, 1), torch.int64)
>>> mul = torch.ops.aten.mul.Tensor
>>> call = build_call(mul, (Slot(0), 2.5), {}, (x,), outs=infer(mul, (Slot(0), 2.5), {}, (x,)))
>>> call.outs
(Meta(size=(2, 3), stride=(3, 1), dtype=torch.float32),)
>>> call([jax.numpy.ones((2, 3), "int32")], [])[0].dtype
dtype('float32')

Shapes and dtypes come from torch itself, see `shape_inference`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from isoshard.torch_bridge._torch_internals import OpOverload, schema_of
from isoshard.torch_bridge._torch_internals.dispatcher import Promotion as KIND
from isoshard.torch_bridge._torch_internals.dispatcher import elementwise_dtypes
from isoshard.torch_bridge.common.dtypes import is_wide, numpy_dtype, physical_dtype
from isoshard.torch_bridge.engine.values.metas import Lift, Meta, Slot, map_leaves
from isoshard.torch_bridge.lowerings import channels_last, registry
from isoshard.torch_bridge.lowerings.argument_forms import as_scalar, cast, wide_dtype

from .checks import check_moved_only
from .number_range import FACTORS, in_range
from .shape_inference import missing


class ImagesOp(NamedTuple):
    """The same call on images with channels last.

    Attributes:
        run: the computation.
        slots: numbers of the tensors that are images.
        results: numbers of the results that are.
    """

    run: Callable[..., Any]
    slots: frozenset[int]
    results: frozenset[int]


Decomposition = Callable[..., Any]

# Arguments that only steer where and how torch allocates.
_PLACEMENT = frozenset(
    {"device", "layout", "pin_memory", "memory_format", "non_blocking", "generator"}
)


@dataclasses.dataclass(frozen=True, eq=False)
class BoundOp:
    """A prepared call: `call(inputs, scalars, key)` computes it on arrays.

    Attributes:
        op: the (functional) aten overload.
        outs: one meta per result; None for a result that torch leaves undefined.
        written: numbers of the tensor arguments whose new values follow the results.
        random: whether a PRNG key is needed.
        run: the computation.
        ins: one meta per tensor argument.
        images: the same with channels last, for operators on images.
        plain: every argument is a tensor; the others are as the operator has them by default.
        args: those of the call, with `Slot` for tensors and `Lift` for lifted floats.
        kwargs: likewise.
    """

    op: OpOverload
    outs: tuple[Meta | None, ...]
    written: tuple[int, ...]
    random: bool
    run: Callable[..., Any]
    ins: tuple[Meta, ...]
    images: ImagesOp | None = None
    plain: bool = False
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def __call__(
        self,
        inputs: Sequence[jax.Array],
        scalars: Sequence[jax.Array],
        key: jax.Array | None = None,
    ) -> list[jax.Array | None]:
        """Compute the results, then the new values of written arguments, in physical dtypes."""
        outputs = self.run(inputs, scalars, key)
        flat = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
        want = [*self.outs, *(self.ins[index] for index in self.written)]
        if len(flat) != len(want):
            raise TypeError(
                f"the lowering of {self.op} returned {len(flat)} values, torch promises {len(want)}"
            )
        return [_conform(self.op, value, meta) for value, meta in zip(flat, want, strict=True)]


def build_call(
    op: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    metas: tuple[Meta, ...],
    *,
    outs: tuple[Meta | None, ...],
    decompose: Callable[[OpOverload], Decomposition | None] | None = None,
) -> BoundOp:
    """Prepare one call.

    Args:
        op: a functional aten overload.
        args: its arguments, with `Slot` for tensors and `Lift` for lifted floats.
        kwargs: likewise.
        metas: the meta of each slot.
        outs: the results torch promises; see `shape_inference.infer`.
        decompose: finds a function `(args, kwargs, metas, inputs, scalars, key)` for an operator
            without a lowering.

    Raises:
        NotImplementedError: `op` has neither a lowering nor a decomposition.
    """
    lowering = registry.find(op)
    if lowering is None:
        run = decompose(op) if decompose else None
        if run is None:
            raise NotImplementedError(missing(op))
        return BoundOp(op, outs, (), False, _bind_decomposition(run, args, kwargs, metas), metas)
    check_moved_only(op, (*metas, *outs))
    plain = not kwargs and all(isinstance(arg, Slot) for arg in args)
    template = args, kwargs
    args, kwargs = _steer(op, args, kwargs)
    _check_integers(op, args, kwargs, outs)
    args, kwargs = in_range(op, args, kwargs, outs)
    written = _written(op, lowering, args, kwargs)
    if lowering.strided:
        kwargs["contiguous"] = metas[0].is_contiguous
    if lowering.sized and outs[0] is not None:
        kwargs["shape"] = outs[0].size
    if not metas and "dtype" in [argument.name for argument in schema_of(op).arguments]:
        assert outs[0] is not None
        kwargs["dtype"] = physical_dtype(
            outs[0].dtype
        )  # torch's default dtype, where none is given
    dtype = _promotion(lowering, op, args, kwargs, metas)
    dtypes = [physical_dtype(meta.dtype) for meta in (*metas, *outs) if meta is not None]
    wide = any(map(is_wide, dtypes if dtype is None else (*dtypes, dtype)))
    run = _bind(lowering, op, args, kwargs, dtype, wide)
    images = _images(lowering, op, args, kwargs, dtype, wide)
    draws = _draws(lowering, op, args, kwargs)
    return BoundOp(op, outs, written, draws, run, metas, images, plain, *template)


def _leaves(values: list[Any]) -> list[Any]:
    """Arguments, or their new values, with lists of tensors flattened."""
    return [leaf for value in values for leaf in (value if type(value) is list else [value])]


def _steer(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Drop placement arguments, passed by name or by position, and translate dtypes."""
    names = [argument.name for argument in schema_of(op).arguments]
    steered = tuple(
        None if name in _PLACEMENT else map_leaves(_dtype, arg)
        for name, arg in zip(names, args, strict=False)
    )
    while steered and steered[-1] is None and names[len(steered) - 1] in _PLACEMENT:
        steered = steered[:-1]
    return steered, {k: map_leaves(_dtype, v) for k, v in kwargs.items() if k not in _PLACEMENT}


def _dtype(leaf: Any) -> Any:
    return physical_dtype(leaf) if isinstance(leaf, torch.dtype) else leaf


def _named(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    names = [argument.name for argument in schema_of(op).arguments]
    return [*zip(names, args, strict=False), *kwargs.items()]


def _written(
    op: OpOverload, lowering: registry.Lowering, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, ...]:
    named = dict(_named(op, args, kwargs))
    slots = _leaves([named.get(name) for name in lowering.writes])
    return tuple(slot.index for slot in slots if isinstance(slot, Slot))


def _draws(
    lowering: registry.Lowering, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether this call needs a PRNG key."""
    if isinstance(lowering.random, str):
        return bool(dict(_named(op, args, kwargs)).get(lowering.random))
    return lowering.random


def _promotion(
    lowering: registry.Lowering,
    op: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    metas: tuple[Meta, ...],
) -> np.dtype | None:
    """The dtype that a promoting lowering's operands are cast to, or None."""
    if lowering.promote == "none":
        return None
    operands: list[Any] = []
    for name, arg in _named(op, args, kwargs):
        for leaf in (
            arg if isinstance(arg, list | tuple) and not isinstance(arg, Slot | Lift) else [arg]
        ):
            if isinstance(leaf, Slot):
                operands.append(metas[leaf.index].tensor())
            elif name not in FACTORS and isinstance(leaf, Lift):
                operands.append(1.0)
            elif name not in FACTORS and isinstance(leaf, bool | int | float | complex):
                operands.append(leaf)
    kind = KIND.INT_TO_FLOAT if lowering.promote == "float" else KIND.DEFAULT
    dtype = physical_dtype(elementwise_dtypes(*operands, type_promotion_kind=kind)[1])
    return dtype if lowering.promote == "inputs" else wide_dtype(dtype)


def _check_integers(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[Meta | None, ...]
) -> None:
    """Refuse Python integers that do not fit, where 64-bit integers are kept in 32 bits."""
    narrow = [out for out in outs if out and physical_dtype(out.dtype) != numpy_dtype(out.dtype)]
    if not narrow:
        return
    types = {argument.name: str(argument.type) for argument in schema_of(op).arguments}
    for name, value in _named(op, args, kwargs):
        counts = name not in ("min", "max") and (types[name] in _NUMBERS or "Tensor" in types[name])
        # The bounds of int64 mean "no bound" in torch code, and become those of int32.
        if value in (2**63 - 1, -(2**63)):
            continue
        if counts and type(value) is int and not -(2**31) <= value < 2**32:
            raise OverflowError(
                f"{op}: {name}={value} does not fit int32, in which 64-bit integers are kept as "
                "XLA_USE_32BIT_LONG is set; unset it"
            )


def _bind(
    lowering: registry.Lowering,
    op: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: Any,
    wide: bool,
) -> Callable[..., Any]:
    """The computation of a lowering: put arrays in their places, promote, call.

    Where no operand and no result has 64 bits, JAX computes in 32 as it does by default.
    """
    lifted = np.float64 if wide else np.float32

    def is_operand(leaf: Any) -> bool:
        return isinstance(leaf, Slot | Lift) or (type(leaf) in (bool, int, float, complex))

    names = [argument.name for argument in schema_of(op).arguments]
    types = {argument.name: str(argument.type) for argument in schema_of(op).arguments}

    def promoted(name: str) -> bool:
        kind = types.get(name, "")
        return dtype is not None and ("Tensor" in kind or kind in _NUMBERS)

    def run(
        inputs: Sequence[jax.Array], scalars: Sequence[jax.Array], key: jax.Array | None
    ) -> Any:
        def value_of(leaf: Any) -> Any:
            if isinstance(leaf, Slot):
                return inputs[leaf.index]
            return scalars[leaf.index].astype(lifted) if isinstance(leaf, Lift) else leaf

        def lift(leaf: Any) -> Any:
            if not is_operand(leaf):
                return leaf
            return as_scalar(value_of(leaf), dtype)

        with jax.enable_x64(wide):
            real = [
                map_leaves(lift if promoted(name) else value_of, arg)
                for name, arg in zip(names, args, strict=False)
            ]
            named = {
                name: map_leaves(lift if promoted(name) else value_of, arg)
                for name, arg in kwargs.items()
            }
            if lowering.random:
                real.insert(0, key)
            outputs = lowering.function(*real, **named)
        return _drop_unwritten(outputs, lowering, op, args, kwargs)

    return run


def _images(
    lowering: registry.Lowering,
    op: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: np.dtype | None,
    wide: bool,
) -> ImagesOp | None:
    variant = channels_last.VARIANTS.get(op.name())
    if variant is None:
        return None
    replaced = dataclasses.replace(lowering, function=variant.function)
    run = _bind(replaced, op, args, kwargs, dtype, wide)
    named = _named(op, args, kwargs)
    slots = {arg.index for name, arg in named if name in variant.images}
    return ImagesOp(run, frozenset(slots), variant.results)


_NUMBERS = frozenset({"number", "Optional[number]", "Scalar", "Optional[Scalar]", "number?"})


def _drop_unwritten(
    outputs: Any,
    lowering: registry.Lowering,
    op: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Leave out the new values of written arguments that were None in this call."""
    if not lowering.writes:
        return outputs
    named = dict(_named(op, args, kwargs))
    written = [named.get(name) for name in lowering.writes]
    results = outputs[: len(outputs) - len(written)]
    slots, fresh = _leaves(written), _leaves(list(outputs[len(results) :]))
    new_values = [value for value, slot in zip(fresh, slots, strict=True) if isinstance(slot, Slot)]
    return (*results, *new_values)


def _bind_decomposition(
    run: Decomposition, args: tuple[Any, ...], kwargs: dict[str, Any], metas: tuple[Meta, ...]
) -> Callable[..., Any]:
    def bound(
        inputs: Sequence[jax.Array], scalars: Sequence[jax.Array], key: jax.Array | None
    ) -> Any:
        return run(args, kwargs, metas, inputs, scalars, key)

    return bound


def _conform(op: OpOverload, value: Any, meta: Meta | None) -> jax.Array | None:
    """Cast a result to the dtype torch promises; a wrong shape is a fault of the lowering."""
    if meta is None:
        return None
    if tuple(value.shape) != tuple(meta.size):
        raise TypeError(
            f"the lowering of {op} gave shape {tuple(value.shape)}, torch promises {meta.size}"
        )
    dtype = physical_dtype(meta.dtype)
    return value if value.dtype == dtype else cast(value, dtype)
