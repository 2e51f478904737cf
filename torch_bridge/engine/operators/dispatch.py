"""One torch operation in, one tape entry out.

`handle(func, args, kwargs)` is the engine's front door. For each aten overload it builds a handler
once: functional operations, in-place ones (the functional operation, then a write), `out=`
variants, views, and the few special ones in `host_ops`. A handler flattens its arguments to a key
(`call_template`), finds the prepared signature, records, and wraps the results.

>>> print(functional_overload(torch.ops.aten.relu_.default))
aten.relu.default
>>> handle(torch.ops.aten.relu.default, (torch.tensor([-1.0, 2.0]).to("jax"),), {})
tensor([0., 2.], device='jax:0')
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding

from isoshard.core.errors import NoValueError
from isoshard.core.runtime.caches import CALLS, Interned
from isoshard.torch_bridge._torch_internals import OpOverload, schema_of
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.recipes import Recipe
from isoshard.torch_bridge.engine.recording.recorder import Recorder, recorder
from isoshard.torch_bridge.engine.recording.tape import Tape
from isoshard.torch_bridge.engine.signatures import checks, number_checks
from isoshard.torch_bridge.engine.signatures.bound_op import build_call
from isoshard.torch_bridge.engine.signatures.shape_inference import infer
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.engine.values.metas import Meta
from isoshard.torch_bridge.engine.values.symbolic_numbers import present
from isoshard.torch_bridge.engine.values.value import Aval, Value
from isoshard.torch_bridge.engine.values.view_dims import view_spec
from isoshard.torch_bridge.lowerings import registry

from . import (
    cpu_errors,
    decompose,
    error_hints,
    first_state,
    generator_argument,
    host_kernels,
    out_arguments,
    overlaps,
    own_kernels,
)
from .call_template import CallTemplate
from .functionalize import functional_overload, lost_defaults, written

Handler = Callable[[tuple[Any, ...], dict[str, Any]], Any]

# By identity, since hashing an overload is a Python call; `_HANDLED` keeps the overloads alive.
_HANDLERS: dict[int, Handler] = {}
_HANDLED: list[Any] = []
_RECORDED: set[int] = set()
SPECIAL: dict[str, Handler] = {}
"""Operations that are more than a computation, by name; filled by `host_ops` and others."""


def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one aten overload on `jax` tensors.

    Raises:
        Exception: of the class that the CPU's kernel raises, where it rejects the call as well.
    """
    return dispatch(None, func, (), args, kwargs)


def dispatch(
    _cls: Any, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """`__torch_dispatch__` of tensors on the device: `handle`."""
    handler = _HANDLERS.get(id(func))
    if handler is None:
        handler = _keep_handler(func)
    if kwargs is None:
        kwargs = {}
    try:
        return handler(args, kwargs)
    except Exception as error:
        like = cpu_errors.like_cpu(func, args, kwargs, error)
        error_hints.add_hint(func, args, like)
        if like is error:
            raise
        raise like from error


def _keep_handler(func: Any) -> Handler:
    handler = _HANDLERS[id(func)] = generator_argument.honour(func, make_handler(func))
    _HANDLED.append(func)
    return handler


def around(func: OpOverload, wrap: Callable[[Any], Handler]) -> None:
    """Let an overload be handled by what `wrap` makes of how it is handled now.

    Args:
        func: the overload; it does not count as `only_recorded` any more.
        wrap: of one handler, another.
    """
    present = _HANDLERS.get(id(func)) or _keep_handler(func)
    _HANDLERS[id(func)] = wrap(present)
    _RECORDED.discard(id(func))


def only_recorded(func: OpOverload) -> None:
    """Tell of an overload that its handler takes a call down, and that no other code runs."""
    if func.namespace == "aten":
        _RECORDED.add(id(func))


def is_only_recorded(func: Any, types: Sequence[type]) -> bool:
    """Whether a call on a tape, with tensors of these classes, runs no code but torch's and ours.

    What a user has registered for an operator runs when a program is compiled, or once for each
    kind of arguments.
    """
    if type(recorder()) is not Tape or any(kind is not lazy_tensor._CLASS for kind in types):
        return False
    if id(func) not in _HANDLERS:
        if not isinstance(func, OpOverload):  # torch.cond and its like: no schema, other code runs
            return False
        _keep_handler(func)
    return id(func) in _RECORDED


def make_handler(func: OpOverload) -> Handler:
    """Choose how an overload is handled, from its schema."""
    name = func.name()
    if name in SPECIAL:
        return SPECIAL[name]
    schema = schema_of(func)
    outs = [argument.name for argument in schema.arguments if argument.is_out]
    writes = written(schema.arguments)
    if outs:
        return out_arguments.handler(func, outs, handle)
    if func.namespace == "aten" and writes:
        return in_place_handler(func, writes)
    if decompose.is_composite(func) and registry.find(func) is None:
        return lambda args, kwargs: func.decompose(*args, **kwargs)
    kernel = own_kernels.find(func)
    if kernel is not None:
        return _unless_lowered(func, kernel)
    if writes:
        return in_place_handler(func, writes)
    if any(result.alias_info for result in schema.returns):
        raise NotImplementedError(
            f"{func} returns a view that the jax device cannot follow; use a copy (.clone(), "
            f"torch.{schema.name.removeprefix('aten::')}_copy) or .cpu()"
        )
    return functional_handler(func)


def _unless_lowered(func: OpOverload, kernel: Handler) -> Handler:
    """An operator's own kernel, until a lowering is registered for it."""
    lowered = functools.cache(lambda: functional_handler(func))
    called_back = functools.cache(lambda: functional_handler(func, host_kernels.find))

    def handler(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if registry.find(func) is not None:
            return lowered()(args, kwargs)
        try:
            return kernel(args, kwargs)
        except NoValueError:
            schema = schema_of(func)
            non_tensors = [
                return_ for return_ in schema.returns if "Tensor" not in str(return_.type)
            ]
            if non_tensors or written(schema.arguments):  # of which a program has none to give
                raise
            return called_back()(args, kwargs)

    return handler


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

    def __init__(
        self,
        recipe: Recipe,
        outs: tuple[Any, ...],
        single: bool,
        written: tuple[int, ...],
        like: int,
    ):
        """See the class."""
        self.recipe = recipe
        recipe.call = self
        self.outs = outs
        self.single = single
        self.written = written
        self.like = like


def prepare(
    func: OpOverload,
    functional: OpOverload,
    flattener: CallTemplate,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[lazy_tensor.LazyTensor],
    scalars: list[Any],
    *,
    outs: tuple[Meta | None, ...] | None = None,
    decomposition: Callable[[OpOverload], Any] = decompose.find,
) -> Signature:
    """Build the signature of a call that was not seen before."""
    positional, named, lifts = flattener.template(args, kwargs)
    metas = tuple(tensor._aval.meta for tensor in tensors)
    check = number_checks.find(functional, positional, named, metas) if scalars else None
    if outs is None:
        if check is not None:
            check(scalars)  # which torch does before it looks at dtypes
        outs = infer(func, positional, named, metas, [present(scalar) for scalar in scalars])
    call = build_call(functional, positional, named, metas, outs=outs, decompose=decomposition)

    def run(
        arrays: Sequence[jax.Array], scalars: Sequence[jax.Array], key: jax.Array | None
    ) -> list[jax.Array]:
        return [array for array in call(arrays, scalars, key) if array is not None]

    count = sum(out is not None for out in outs) + len(call.written)
    recipe = Recipe(functional.name(), run, count, random=call.random, lifted=lifts, detail=call)
    recipe.check = check
    avals = tuple(None if out is None else Aval.of(out) for out in outs)
    returns = schema_of(functional).returns
    single = len(returns) == 1 and "List" not in str(returns[0].type)
    like = 0 if _is_like(functional.name(), outs, metas) else -1
    return Signature(recipe, avals, single, call.written, like)


def _is_like(name: str, outs: Sequence[Meta | None], models: Sequence[Meta]) -> bool:
    """Whether a factory's result is sharded as its model: `_like`, or `new_` in its shape."""
    factory = name.partition(".")[0]
    if factory not in _LIKE and factory not in _NEW:
        return False
    result, model = outs[0], models[0]
    return result is not None and result.size == model.size


_KINDS = ("zeros", "ones", "full", "empty")
_LIKE = frozenset(
    ("aten::clone", *(f"aten::{kind}_like" for kind in (*_KINDS, "rand", "randn", "randint")))
)
_NEW = frozenset(f"aten::new_{kind}" for kind in (*_KINDS, "empty_strided"))


def functional_handler(
    func: OpOverload, decomposition: Callable[[OpOverload], Any] = decompose.find
) -> Handler:
    """A handler that records an operator whose schema declares no writes."""
    flattener = CallTemplate(func)
    flatten = flattener.__call__  # looked up once: this runs for every operation
    signatures: Interned[Any, Signature] = Interned(CALLS, "engine: signatures by operator")
    zeros = first_state.zeros if func.name() == first_state.NAME else None
    copies = func.name() == "aten::clone"
    only_recorded(func)

    def handler(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key, tensors, scalars = flatten(args, kwargs)
        signature = signatures.get(key)
        if signature is None:
            signature = signatures.again(key)
        if signature is None:
            call: Any = (func, func, flattener, args, kwargs, tensors, scalars)
            signature = prepare(*call, decomposition=decomposition)
            signature = signatures.intern(key, signature)
        current = recorder()
        outs = signature.outs
        state = None if zeros is None else zeros(current, tensors[0], outs[0])
        values = record(current, signature, tensors, scalars) if state is None else [state]
        if signature.single:
            tensor = lazy_tensor.fresh(outs[0], values[0], current)
            if signature.like >= 0:
                _follow(tensor, tensors[signature.like], copies)
            return tensor
        if signature.written:
            for index, value in zip(
                signature.written, values[len(values) - len(signature.written) :], strict=True
            ):
                lazy_tensor.write(tensors[index], value)
        if len(values) < len(outs):
            values = iter(values)
            return tuple(
                None if out is None else lazy_tensor.fresh(out, next(values)) for out in outs
            )
        results = [lazy_tensor.fresh(out, value) for out, value in zip(outs, values, strict=False)]
        return results if len(schema_of(func).returns) == 1 else tuple(results)

    return handler


def record(
    current: Recorder, signature: Signature, tensors: list[Any], scalars: list[Any]
) -> list[Value]:
    """Record a prepared call on `recorder()`, which the caller has read once."""
    if scalars and signature.recipe.check is not None:
        signature.recipe.check(scalars)
    if current.log is None:  # the common case of `lazy_tensor.read`, in place: the hottest line
        values = [
            lazy_tensor.read(tensor) if tensor._chain.ops else tensor._storage.value
            for tensor in tensors
        ]
    else:
        values = [lazy_tensor.read(tensor) for tensor in tensors]
    return current.record(signature.recipe, values, scalars)


def _follow(tensor: lazy_tensor.LazyTensor, like: lazy_tensor.LazyTensor, copy: bool) -> None:
    """Results of factories take over their model's layout (optimizer state, masks).

    Of a view they are unsharded along an axis of which it shows a slice. The `copy` of a view is
    sharded as the compiler has its elements.
    """
    source, chain = like._storage, like._chain
    layout_id, annotation = source.value.layout, source.annotation
    if layout_id == sharding_ids.UNPLACED:
        return
    if chain.ops:
        sharding = sharding_ids.as_named(layout_id)
        if copy or not isinstance(sharding, NamedSharding):
            return
        spec = view_spec(chain, sharding.spec, gathered=True)
        shown = NamedSharding(sharding.mesh, spec)
        layout_id, annotation = sharding_ids.intern(shown), annotation and shown
    tensor._storage.value.layout = layout_id
    tensor._storage.annotation = annotation


def in_place_handler(func: OpOverload, writes: list[str]) -> Handler:
    """A handler that records an operator's functional overload, and writes what it computes.

    Args:
        func: an in-place overload.
        writes: names of the arguments it writes to; one, a tensor or a list of tensors.

    Raises:
        NotImplementedError: it has none.
    """
    only_recorded(func)
    functional = functional_overload(func)
    flattener = CallTemplate(functional)
    flatten = flattener.__call__
    signatures: Interned[Any, Signature] = Interned(CALLS, "engine: signatures by operator")
    names = [argument.name for argument in schema_of(func).arguments]
    position = names.index(writes[0])
    returns = bool(schema_of(func).returns)
    defaults = lost_defaults(func, functional)
    idempotent = functional.name() in _IDEMPOTENT
    alone = overlaps.rule(func) if len(writes) == 1 else None

    def handler(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for index, name, default in defaults:
            if len(args) <= index and name not in kwargs:
                kwargs = {**kwargs, name: default}
        target = args[position]
        many = isinstance(target, list | tuple)
        targets = list(target) if many else [target]
        if not idempotent:
            for tensor in targets:
                if type(tensor) is not lazy_tensor._CLASS or tensor._aval.expanded:
                    overlaps.check_writable(func, tensor)
        key, tensors, scalars = flatten(args, kwargs)
        if alone is not None and len(tensors) > 1 and not many:
            storage = target._storage
            if [tensor._storage for tensor in tensors].count(storage) > 1:
                overlaps.check_overlap(target, tensors[:position] + tensors[position + 1 :], alone)
        signature = signatures.get(key)
        if signature is None:
            signature = signatures.again(key)
        if signature is None:
            positional, named, _ = flattener.template(args, kwargs)
            metas = tuple(tensor._aval.meta for tensor in tensors)
            present_scalars = [present(scalar) for scalar in scalars]
            check = number_checks.find(functional, positional, named, metas) if scalars else None
            if check is not None:
                check(scalars)
            outs = tuple(tensor._aval.meta for tensor in targets)
            if checks.may_grow(outs, metas):  # before the next check, which would let it grow
                checks.check_size(
                    infer(functional, positional, named, metas, present_scalars), outs
                )
            if checks.may_widen(functional, outs[0].dtype, metas, positional):
                checks.check_cast(
                    infer(functional, positional, named, metas, present_scalars), outs
                )
            if not many:
                infer(func, positional, named, metas, present_scalars)  # torch's own checks
            signature = prepare(
                func, functional, flattener, args, kwargs, tensors, scalars, outs=outs
            )
            signature = signatures.intern(key, signature)
        current = recorder()
        values = record(current, signature, tensors, scalars)
        for tensor, value in zip(targets, values, strict=False):
            lazy_tensor.write(tensor, value, current)
        if many:  # torch counts the versions of single tensors itself, but not of lists
            torch.autograd.graph.increment_version(targets)
        return target if returns else None

    return handler


_IDEMPOTENT = frozenset({"aten::fill.Scalar", "aten::fill.Tensor", "aten::zero"})
"""Writes of one number everywhere: torch lets them write to an expanded tensor."""


lazy_tensor.use_dispatch(dispatch)
