"""One torch operation in, one tape entry out.

`handle(func, args, kwargs)` is the engine's front door. For each aten overload it builds a handler
once: functional operations, in-place ones (the functional operation, then a write), `out=`
variants, views, and the few special ones in `special`. A handler flattens its arguments to a key
(`flatten`), finds the prepared signature, records, and wraps the results.

>>> print(functional_twin(torch.ops.aten.relu_.default))
aten.relu.default
>>> handle(torch.ops.aten.relu.default, (torch.tensor([-1.0, 2.0]).to("jax"),), {})
tensor([0., 2.], device='jax:0')
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

from isoshard.core.bounded import CALLS, Interned
from isoshard.torch_bridge._torch_internals import OpOverload, schema_of
from isoshard.torch_bridge.lowerings import registry

from . import (
    base,
    checks,
    cpu_errors,
    decompose,
    generators,
    kernels,
    layouts,
    number_checks,
    out_dtypes,
    overlaps,
)
from .call import build_call, infer
from .capture.symbolic import present
from .flatten import Flattener
from .recipes import Recipe
from .recorder import Recorder, recorder
from .twins import functional_twin, lost_defaults, written
from .value import Aval, Value, contiguous_stride

Handler = Callable[[tuple[Any, ...], dict[str, Any]], Any]

# By identity, since hashing an overload is a Python call; `_KNOWN` keeps the overloads alive.
_HANDLERS: dict[int, Handler] = {}
_KNOWN: list[Any] = []
SPECIAL: dict[str, Handler] = {}
"""Operations that are more than a computation, by name; filled by `special` and `aliases`."""


def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one aten overload on `jax` tensors.

    Raises:
        Exception: of the class that the CPU's kernel raises, where it refuses the call as well.
    """
    handler = _HANDLERS.get(id(func))
    if handler is None:
        handler = generators.honour(func, make_handler(func))
        _HANDLERS[id(func)] = handler
        _KNOWN.append(func)
    try:
        return handler(args, kwargs)
    except Exception as error:
        like = cpu_errors.like_cpu(func, args, kwargs, error)
        if like is error:
            raise
        raise like from error


def make_handler(func: OpOverload) -> Handler:
    """Choose how an overload is handled, from its schema."""
    name = func.name()
    if name in SPECIAL:
        return SPECIAL[name]
    schema = schema_of(func)
    outs = [argument.name for argument in schema.arguments if argument.is_out]
    writes = written(schema.arguments)
    if outs:
        return _out_handler(func, outs)
    if func.namespace == "aten" and writes:
        return in_place_handler(func, writes)
    if decompose.is_composite(func) and registry.find(func) is None:
        return lambda args, kwargs: func.decompose(*args, **kwargs)
    own = kernels.find(func)
    if own is not None:
        return _unless_lowered(func, own)
    if writes:
        return in_place_handler(func, writes)
    if any(result.alias_info for result in schema.returns):
        raise NotImplementedError(
            f"{func} returns a view that the jax device cannot follow; use a copy (.clone(), "
            f"torch.{schema.name.removeprefix('aten::')}_copy) or .cpu()"
        )
    return functional_handler(func)


def _unless_lowered(func: OpOverload, own: Handler) -> Handler:
    """An operator's own kernel, until somebody registers a lowering for it."""
    lowered = functools.cache(lambda: functional_handler(func))
    return lambda args, kwargs: (own if registry.find(func) is None else lowered())(args, kwargs)


class Signature:
    """What is known of a call before its values.

    Attributes:
        recipe: what the tape records.
        outs: the aval of each result; None for one that torch leaves undefined.
        single: the result is one tensor and not a sequence.
        written: numbers of the tensor arguments that get new values.
        like: number of the tensor argument whose layout the result takes over, or -1.
    """

    __slots__ = ("__weakref__", "like", "outs", "recipe", "single", "written")

    def __init__(self, recipe: Recipe, outs, single: bool, written: tuple[int, ...], like: int):
        """See the class."""
        self.recipe = recipe
        recipe.found_by = self
        self.outs = outs
        self.single = single
        self.written = written
        self.like = like


def prepare(func, functional, flattener, args, kwargs, tensors, scalars, *, outs=None) -> Signature:
    """Build the signature of a call that was not seen before."""
    positional, named, lifts = flattener.template(args, kwargs)
    metas = tuple(tensor._aval.meta for tensor in tensors)
    check = number_checks.find(functional, positional, named, metas) if scalars else None
    if outs is None:
        if check is not None:
            check(scalars)  # which torch does before it looks at dtypes
        outs = infer(func, positional, named, metas, [present(scalar) for scalar in scalars])
    call = build_call(functional, positional, named, metas, outs=outs, decompose=decompose.find)

    def run(arrays, scalars, key):
        return [array for array in call(arrays, scalars, key) if array is not None]

    count = sum(out is not None for out in outs) + len(call.written)
    recipe = Recipe(functional.name(), run, count, random=call.random, lifted=lifts, detail=call)
    recipe.check = check
    avals = tuple(None if out is None else Aval.of(out) for out in outs)
    returns = schema_of(functional).returns
    single = len(returns) == 1 and "List" not in str(returns[0].type)
    like = 0 if functional.name() in _LIKE and tensors else -1
    return Signature(recipe, avals, single, call.written, like)


_LIKE = frozenset(
    f"aten::{name}" for name in ("zeros_like", "ones_like", "full_like", "empty_like", "clone")
)


def functional_handler(func: OpOverload) -> Handler:
    """A handler that records an operator which writes nothing that its schema tells of."""
    flattener = Flattener(func)
    signatures: Interned[Any, Signature] = Interned(CALLS)

    def handler(args, kwargs):
        key, tensors, scalars = flattener(args, kwargs)
        signature = signatures.get(key)
        if signature is None:
            signature = signatures.again(key)
        if signature is None:
            signature = prepare(func, func, flattener, args, kwargs, tensors, scalars)
            signature = signatures.intern(key, signature)
        here = recorder()
        values = record(here, signature, tensors, scalars)
        outs = signature.outs
        if signature.single:
            tensor = base.fresh(outs[0], values[0], here)
            if signature.like >= 0:
                _follow(tensor, tensors[signature.like])
            return tensor
        if signature.written:
            for number, value in zip(
                signature.written, values[len(values) - len(signature.written) :], strict=True
            ):
                base.write(tensors[number], value)
        if len(values) < len(outs):
            values = iter(values)
            return tuple(None if out is None else base.fresh(out, next(values)) for out in outs)
        got = [base.fresh(out, value) for out, value in zip(outs, values, strict=False)]
        return got if len(schema_of(func).returns) == 1 else tuple(got)

    return handler


def record(
    here: Recorder, signature: Signature, tensors: list[Any], scalars: list[Any]
) -> list[Value]:
    """Record a prepared call on `recorder()`, which the caller has asked for once."""
    if scalars and signature.recipe.check is not None:
        signature.recipe.check(scalars)
    if here.log is None:  # the common case of `base.read`, in place: this is the hottest line
        values = [
            base.read(tensor) if tensor._chain.ops else tensor._storage.value for tensor in tensors
        ]
    else:
        values = [base.read(tensor) for tensor in tensors]
    return here.record(signature.recipe, values, scalars)


def _follow(tensor: base.LazyTensor, like: base.LazyTensor) -> None:
    """Results of `zeros_like` and friends lie where their model lies (optimizer state)."""
    source = like._storage
    if not like._chain.ops and source.value.layout != layouts.UNPLACED:
        tensor._storage.value.layout = source.value.layout
        tensor._storage.annotation = source.annotation


def in_place_handler(func: OpOverload, writes: list[str]) -> Handler:
    """A handler that records an operator's functional twin, and writes what it computes.

    Args:
        func: an in-place overload.
        writes: names of the arguments it writes to; one, a tensor or a list of tensors.

    Raises:
        NotImplementedError: it has no twin.
    """
    functional = functional_twin(func)
    flattener = Flattener(functional)
    signatures: Interned[Any, Signature] = Interned(CALLS)
    names = [argument.name for argument in schema_of(func).arguments]
    position = names.index(writes[0])
    returns = bool(schema_of(func).returns)
    defaults = lost_defaults(func, functional)
    idempotent = functional.name() in _IDEMPOTENT
    alone = overlaps.rule(func) if len(writes) == 1 else None

    def handler(args, kwargs):
        for place, name, default in defaults:
            if len(args) <= place and name not in kwargs:
                kwargs = {**kwargs, name: default}
        target = args[position]
        many = isinstance(target, list | tuple)
        targets = list(target) if many else [target]
        if not idempotent:
            for tensor in targets:
                check_writable(func, tensor)
        key, tensors, scalars = flattener(args, kwargs)
        if alone is not None and not many:
            storage, others = target._storage, -1
            for tensor in tensors:
                others += tensor._storage is storage
            if others:
                overlaps.refuse(target, tensors[:position] + tensors[position + 1 :], alone)
        signature = signatures.get(key)
        if signature is None:
            signature = signatures.again(key)
        if signature is None:
            positional, named, _ = flattener.template(args, kwargs)
            metas = tuple(tensor._aval.meta for tensor in tensors)
            numbers = [present(scalar) for scalar in scalars]
            check = number_checks.find(functional, positional, named, metas) if scalars else None
            if check is not None:
                check(scalars)
            outs = tuple(tensor._aval.meta for tensor in targets)
            if checks.may_grow(outs, metas):  # before the next check, which would let it grow
                checks.check_size(infer(functional, positional, named, metas, numbers), outs)
            if checks.may_widen(outs[0].dtype, metas, positional):
                checks.check_cast(infer(functional, positional, named, metas, numbers), outs)
            if not many:
                infer(func, positional, named, metas, numbers)  # torch's own checks
            signature = prepare(
                func, functional, flattener, args, kwargs, tensors, scalars, outs=outs
            )
            signature = signatures.intern(key, signature)
        here = recorder()
        values = record(here, signature, tensors, scalars)
        for tensor, value in zip(targets, values, strict=False):
            base.write(tensor, value, here)
        if many:  # torch counts the versions of single tensors itself, but not of lists
            torch.autograd.graph.increment_version(targets)
        return target if returns else None

    return handler


_IDEMPOTENT = frozenset({"aten::fill.Scalar", "aten::fill.Tensor", "aten::zero"})
"""Writes of one number everywhere: torch lets them write to an expanded tensor."""


def check_writable(func: Any, tensor: torch.Tensor) -> None:
    """Refuse what torch refuses: writing to a CPU tensor from here, or to a broadcast view."""
    if not isinstance(tensor, base.LazyTensor):
        raise RuntimeError(
            f"{func} would write values of jax tensors into a tensor on {tensor.device}; move them "
            "with .cpu() first"
        )
    if is_expanded(tensor):
        raise RuntimeError(
            f"unsupported operation: {func} writes to an expanded tensor, in which more than one "
            "element refers to a single memory location. Please clone() the tensor first."
        )


def is_expanded(tensor: Any) -> bool:
    """Whether some elements of a `jax` tensor share memory because it is a broadcast."""
    meta = tensor._aval.meta
    return (
        0 in meta.stride
        and 0 not in meta.size
        and any(
            step == 0 and extent > 1 for step, extent in zip(meta.stride, meta.size, strict=True)
        )
    )


def _out_handler(func: OpOverload, outs: list[str]) -> Handler:
    """A handler that runs the functional twin, and copies its results to the `out=` arguments."""
    functional = functional_twin(func)
    ours = {argument.name for argument in schema_of(func).arguments}
    takes_dtype = "dtype" not in ours and any(
        argument.name == "dtype" for argument in schema_of(functional).arguments
    )
    alone = overlaps.rule(functional)
    quiet = schema_of(func).name in _GROW_QUIETLY
    follows = func.name() in _DTYPE_OF_OUT
    as_shaped = schema_of(func).name in _AS_SHAPED
    stays = schema_of(func).name in _STAYS

    def handler(args, kwargs):
        given = [kwargs[name] for name in outs]
        targets = [leaf for out in given for leaf in (out if isinstance(out, list) else [out])]
        rest = {name: value for name, value in kwargs.items() if name not in outs}
        if takes_dtype or (follows and rest.get("dtype") is None):
            rest["dtype"] = targets[0].dtype
        if alone is not None:
            read = [*args, *rest.values()]
            read += [leaf for arg in read if isinstance(arg, list | tuple) for leaf in arg]
            ours_read = [leaf for leaf in read if isinstance(leaf, base.LazyTensor)]
            for target in targets:
                if isinstance(target, base.LazyTensor):
                    overlaps.refuse(target, ours_read, alone)
        got = handle(functional, args, rest)
        results = [got] if isinstance(got, torch.Tensor) else list(got)
        if any(one.dtype != other.dtype for one, other in zip(targets, results, strict=True)):
            out_dtypes.refuse(func, args, kwargs, results, targets, func.name() in SPECIAL)
        for target, result in zip(targets, results, strict=True):
            check_writable(func, target)
            if stays and not result.numel():
                continue
            if as_shaped and target.numel() == result.numel():
                result = result.reshape(target.shape)
            if target.shape != result.shape:
                if not quiet:
                    warn_of_resizing(target, result)
                _resize(target, result)
            else:
                torch.ops.aten.copy_.default(target, result)
        if not schema_of(func).returns:
            return None
        return given[0] if len(given) == 1 else tuple(given)

    return handler


_STAYS = frozenset({"aten::native_batch_norm", "aten::_native_batch_norm_legit"})
"""Operators that leave an `out=` as it is where they have nothing for it."""


_DTYPE_OF_OUT = frozenset({"aten::cumsum.out", "aten::cumprod.out", "aten::prod.int_out"})
"""Operators that compute in the dtype of `out=`."""

_GROW_QUIETLY = frozenset(
    f"aten::{name}"
    for name in (
        *("linspace", "logspace", "range", "narrow_copy", "full", "eye", "zeros", "ones"),
        *("rand", "randn", "randint", "randperm", "addbmm", "log_sigmoid_forward"),
        *("bernoulli", "multinomial", "normal"),
    )
)
"""Operators that write to an `out=` of another size without a warning."""

_AS_SHAPED = frozenset(f"aten::{name}" for name in ("arange", "range", "linspace", "logspace"))
"""Operators that fill an `out=` with as many elements, whatever its shape."""


def warn_of_resizing(target: Any, result: Any) -> None:
    """Say that an `out=` with elements gets another size, as torch does."""
    if target.numel():
        warnings.warn(
            f"An output with one or more elements was resized since it had shape "
            f"{list(target.shape)}, which does not match the required output shape "
            f"{list(result.shape)}; resize it to no elements first, with t.resize_(0), to have it "
            "written anew",
            stacklevel=2,
        )


def _resize(target: Any, result: Any) -> None:
    """Give `target` another size; a view grows within the memory that it views, as in torch."""
    size, offset = tuple(result.shape), target.storage_offset()
    extent = math.prod(target._storage.aval.meta.size)
    if target._chain.ops and offset + result.numel() <= extent:
        view = torch.ops.aten.as_strided.default(target, size, contiguous_stride(size), offset)
        torch.ops.aten.copy_.default(view, result)
        base.adopt(target, view)
    else:
        base.adopt(target, result if target.dtype == result.dtype else result.to(target.dtype))


base.use_handler(handle)
