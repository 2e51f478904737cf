"""One torch operation in, one tape entry out.

`handle(func, args, kwargs)` is the engine's front door. For each aten overload it builds a handler
once: functional operations, in-place ones (the functional operation, then a write), `out=` variants,
views, and the few special ones in `special`. A handler flattens its arguments to a key, finds the
prepared signature, records, and wraps the results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from isoshard.torch_bridge.dtypes import physical_dtype
from isoshard.torch_bridge.engine import base, decompose, layouts
from isoshard.torch_bridge.engine import tape as tapes
from isoshard.torch_bridge.engine.call import (
    Lift,
    Meta,
    Slot,
    build_call,
    infer,
    map_leaves,
    missing,
)
from isoshard.torch_bridge.engine.tape import Recipe
from isoshard.torch_bridge.engine.value import Aval, Value, check_storable
from isoshard.torch_bridge.lowerings import registry

Handler = Callable[[tuple[Any, ...], dict[str, Any]], Any]

_HANDLERS: dict[Any, Handler] = {}
SPECIAL: dict[str, Handler] = {}
"""Operations that are more than a computation, by schema name; filled by `special` and `aliases`."""


def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one aten overload on `jax` tensors."""
    handler = _HANDLERS.get(func)
    if handler is None:
        handler = _HANDLERS[func] = make_handler(func)
    return handler(args, kwargs)


def make_handler(func: torch._ops.OpOverload) -> Handler:
    """Choose how an overload is handled, from its schema."""
    name = func.name()
    if name in SPECIAL:
        return SPECIAL[name]
    schema = func._schema
    outs = [argument.name for argument in schema.arguments if argument.is_out]
    writes = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    if outs:
        return _out_handler(func, outs)
    if writes:
        return _in_place_handler(func, writes)
    if decompose.is_composite(func) and registry.find(func) is None:
        return lambda args, kwargs: func.decompose(*args, **kwargs)
    if any(result.alias_info for result in schema.returns):
        raise NotImplementedError(
            f"{func} returns a view that the jax device cannot follow; use a copy "
            "(.clone(), torch.{name}_copy) or .cpu()"
        )
    return _functional_handler(func)


class Signature:
    """What is known of a call before its values.

    Attributes:
        recipe: what the tape records.
        outs: the aval of each result; None for one that torch leaves undefined.
        single: the result is one tensor and not a sequence.
        written: numbers of the tensor arguments that get new values.
        like: number of the tensor argument whose layout the result takes over (`zeros_like`), or -1.
    """

    __slots__ = ("like", "outs", "recipe", "single", "written")

    def __init__(self, recipe: Recipe, outs, single: bool, written: tuple[int, ...], like: int):
        """See the class."""
        self.recipe = recipe
        self.outs = outs
        self.single = single
        self.written = written
        self.like = like


class _Lifted:
    pass


_LIFTED = _Lifted()


class Flattener:
    """Turns the arguments of one overload into a key, tensors and lifted floats."""

    __slots__ = ("func", "lift_kwargs", "lift_positions", "names")

    def __init__(self, func: torch._ops.OpOverload):
        """Look up which arguments are lifted."""
        self.func = func
        lowering = registry.find(func)
        lift = lowering.lift if lowering else ()
        self.names = [argument.name for argument in func._schema.arguments]
        self.lift_positions = frozenset(i for i, name in enumerate(self.names) if name in lift)
        self.lift_kwargs = frozenset(lift)

    def __call__(self, args, kwargs):
        """Returns (key, tensors, scalars)."""
        key: list[Any] = []
        tensors: list[Any] = []
        scalars: list[Any] = []
        cls = base._CLASS
        for position, arg in enumerate(args):
            if type(arg) is cls:
                tensors.append(arg)
                key.append(arg._aval)
            else:
                self._static(arg, position in self.lift_positions, key, tensors, scalars)
        for name, arg in kwargs.items():
            key.append(name)
            if type(arg) is cls:
                tensors.append(arg)
                key.append(arg._aval)
            else:
                self._static(arg, name in self.lift_kwargs, key, tensors, scalars)
        return tuple(key), tensors, scalars

    def _static(self, arg, lift, key, tensors, scalars) -> None:
        kind = type(arg)
        if arg is None or kind is int or kind is str:
            key.append(arg)
        elif kind is float or kind is torch.SymFloat:
            if lift or kind is torch.SymFloat:
                if not lift:
                    raise RuntimeError(
                        f"{self.func} needs a constant where a captured step has a changing number "
                        f"({arg}); compute it from a tensor, or keep it out of the compiled step"
                    )
                scalars.append(arg)
                key.append(_LIFTED)
            else:
                key.append((float, arg))
        elif kind is bool or kind is complex:
            key.append((kind, arg))
        elif kind is list or kind is tuple:
            key.append((len(arg),))
            for item in arg:
                if type(item) is base._CLASS:
                    tensors.append(item)
                    key.append(item._aval)
                else:
                    self._static(item, lift, key, tensors, scalars)
        elif kind is torch.Generator:
            raise RuntimeError(
                f"{self.func}: Expected a 'jax' device type for generator but found "
                f"'{arg.device}'; random numbers of the jax device follow torch.manual_seed(seed)"
            )
        elif isinstance(arg, torch.Tensor):
            tensor = import_tensor(self.func, arg)
            tensors.append(tensor)
            key.append(tensor._aval)
        else:
            key.append(arg)

    def template(self, args, kwargs):
        """The same arguments with `Slot` and `Lift` for what a key abstracts from."""
        slots = lifts = 0

        def mark(lift):
            def leaf(arg):
                nonlocal slots, lifts
                if isinstance(arg, torch.Tensor):
                    slots += 1
                    return Slot(slots - 1)
                if lift and type(arg) in (float, torch.SymFloat):
                    lifts += 1
                    return Lift(lifts - 1)
                return arg

            return leaf

        positional = tuple(
            map_leaves(mark(i in self.lift_positions), arg) for i, arg in enumerate(args)
        )
        named = {
            name: map_leaves(mark(name in self.lift_kwargs), arg) for name, arg in kwargs.items()
        }
        return positional, named, lifts


def import_tensor(func: Any, tensor: torch.Tensor) -> base.LazyTensor:
    """Let a zero-dimensional CPU tensor take part, as every torch device does; refuse others."""
    if isinstance(tensor, base.LazyTensor):
        return tensor
    if tensor.device.type == "cpu" and (tensor.dim() == 0 or func.name() in _CPU_INDICES):
        if tensor.dtype == torch.float64 and physical_dtype(tensor.dtype).itemsize < 8:
            tensor = tensor.float()  # a zero-dimensional operand does not decide the dtype
        aval = Aval.contiguous(tuple(tensor.shape), tensor.dtype)
        return base.fresh(aval, base.host_value(tensor))
    raise RuntimeError(
        f"{func} got tensors on two devices: one on jax:0 and one on {tensor.device} (shape "
        f"{tuple(tensor.shape)}, {tensor.dtype}). Move it with .to('jax'), or place it with "
        "isoshard.shard(tensor, mesh, spec)."
    )


_CPU_INDICES = frozenset({"aten::index.Tensor", "aten::index_put"})


def prepare(func, functional, flattener, args, kwargs, tensors, scalars, *, outs=None) -> Signature:
    """Build the signature of a call that was not seen before."""
    positional, named, lifts = flattener.template(args, kwargs)
    metas = tuple(tensor._aval.meta for tensor in tensors)
    if outs is None:
        outs = infer(func, positional, named, metas, [present(scalar) for scalar in scalars])
    if type(tapes.recorder()) is tapes.Tape:
        for out in outs:
            if out is not None:
                check_storable(out)
    call = build_call(functional, positional, named, metas, outs=outs, decompose=decompose.find)

    def run(arrays, scalars, key):
        return [array for array in call(arrays, scalars, key) if array is not None]

    count = sum(out is not None for out in outs) + len(call.written)
    recipe = Recipe(functional.name(), run, count, random=call.random, lifted=lifts, detail=call)
    avals = tuple(None if out is None else Aval.of(out) for out in outs)
    returns = functional._schema.returns
    single = len(returns) == 1 and "List" not in str(returns[0].type)
    like = 0 if functional.name() in _LIKE and tensors else -1
    return Signature(recipe, avals, single, call.written, like)


_LIKE = frozenset(
    f"aten::{name}" for name in ("zeros_like", "ones_like", "full_like", "empty_like", "clone")
)


def _functional_handler(func: torch._ops.OpOverload) -> Handler:
    flattener = Flattener(func)
    signatures: dict[Any, Signature] = {}

    def handler(args, kwargs):
        key, tensors, scalars = flattener(args, kwargs)
        signature = signatures.get(key)
        if signature is None:
            signature = signatures[key] = prepare(
                func, func, flattener, args, kwargs, tensors, scalars
            )
        values = record(signature, tensors, scalars)
        outs = signature.outs
        if signature.single:
            tensor = base.fresh(outs[0], values[0])
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
        return got if len(func._schema.returns) == 1 else tuple(got)

    return handler


def present(scalar: Any) -> float:
    """The value that a lifted float has now."""
    return scalar.node.value if isinstance(scalar, torch.SymFloat) else scalar


def record(signature: Signature, tensors: list[Any], scalars: list[Any]) -> list[Value]:
    """Record a prepared call on the current tape."""
    values = [base.read(tensor) for tensor in tensors]
    return tapes.recorder().record(signature.recipe, values, scalars)


def _follow(tensor: base.LazyTensor, like: base.LazyTensor) -> None:
    """Results of `zeros_like` and friends lie where their model lies (optimizer state)."""
    source = like._storage
    if not like._chain.ops and source.value.layout != layouts.UNPLACED:
        tensor._storage.value.layout = source.value.layout
        tensor._storage.annotation = source.annotation


def _in_place_handler(func: torch._ops.OpOverload, writes: list[str]) -> Handler:
    functional = functional_twin(func)
    flattener = Flattener(functional)
    signatures: dict[Any, Signature] = {}
    names = [argument.name for argument in func._schema.arguments]
    position = names.index(writes[0])
    returns = bool(func._schema.returns)

    defaults = _lost_defaults(func, functional)

    def handler(args, kwargs):
        for place, name, default in defaults:
            if len(args) <= place and name not in kwargs:
                kwargs = {**kwargs, name: default}
        target = args[position]
        many = isinstance(target, list | tuple)
        targets = list(target) if many else [target]
        for tensor in targets:
            check_writable(func, tensor)
        key, tensors, scalars = flattener(args, kwargs)
        signature = signatures.get(key)
        if signature is None:
            positional, named, _ = flattener.template(args, kwargs)
            metas = tuple(tensor._aval.meta for tensor in tensors)
            if not many:
                numbers = [present(scalar) for scalar in scalars]
                infer(func, positional, named, metas, numbers)  # torch's own checks
            outs = tuple(tensor._aval.meta for tensor in targets)
            signature = signatures[key] = prepare(
                func, functional, flattener, args, kwargs, tensors, scalars, outs=outs
            )
        values = record(signature, tensors, scalars)
        for tensor, value in zip(targets, values, strict=False):
            base.write(tensor, value)
        return target if returns else None

    return handler


def _lost_defaults(func, functional) -> list[tuple[int, str, Any]]:
    """Arguments that may be left out of the in-place overload, but not of its functional twin."""
    twins = {argument.name: argument for argument in functional._schema.arguments}
    return [
        (place, argument.name, argument.default_value)
        for place, argument in enumerate(func._schema.arguments)
        if argument.has_default_value() and not twins[argument.name].has_default_value()
    ]


def check_writable(func: Any, tensor: torch.Tensor) -> None:
    """Refuse what torch refuses: writing to a CPU tensor from here, or to a broadcast view."""
    if not isinstance(tensor, base.LazyTensor):
        raise RuntimeError(
            f"{func} would write values of jax tensors into a tensor on {tensor.device}; move them "
            "with .cpu() first"
        )
    meta = tensor._aval.meta
    if (
        0 in meta.stride
        and 0 not in meta.size
        and any(
            step == 0 and extent > 1 for step, extent in zip(meta.stride, meta.size, strict=True)
        )
    ):
        raise RuntimeError(
            f"unsupported operation: {func} writes to an expanded tensor, in which more than one "
            "element refers to a single memory location. Please clone() the tensor first."
        )


def _out_handler(func: torch._ops.OpOverload, outs: list[str]) -> Handler:
    functional = functional_twin(func)
    ours = {argument.name for argument in func._schema.arguments}
    takes_dtype = "dtype" not in ours and any(
        argument.name == "dtype" for argument in functional._schema.arguments
    )

    def handler(args, kwargs):
        targets = [kwargs[name] for name in outs]
        rest = {name: value for name, value in kwargs.items() if name not in outs}
        if takes_dtype:
            rest["dtype"] = targets[0].dtype
        got = handle(functional, args, rest)
        results = [got] if isinstance(got, torch.Tensor) else list(got)
        for target, result in zip(targets, results, strict=True):
            check_writable(func, target)
            if not torch.can_cast(result.dtype, target.dtype):
                raise RuntimeError(
                    f"{func}: result type {result.dtype} can't be cast to the desired output type "
                    f"{target.dtype}"
                )
            if target.shape != result.shape:
                _resize(target, result)
            else:
                torch.ops.aten.copy_.default(target, result)
        return targets[0] if len(targets) == 1 else tuple(targets)

    return handler


def _resize(target: base.LazyTensor, result: base.LazyTensor) -> None:
    if target.dtype != result.dtype:
        result = result.to(target.dtype)
    base.adopt(target, result)


def functional_twin(func: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """The overload that computes what an in-place or `out=` overload writes.

    Raises:
        NotImplementedError: there is none.
    """
    schema = func._schema
    packet_name = schema.name.removeprefix("aten::")
    candidates = _TWINS.get(packet_name, [packet_name.removesuffix("_"), packet_name.strip("_")])
    wanted = [argument for argument in schema.arguments if not argument.is_out]
    for name in candidates:
        packet = getattr(torch.ops.aten, name, None)
        if packet is None:
            continue
        ranked = sorted(packet.overloads(), key=lambda overload: overload != schema.overload_name)
        for overload in ranked:
            twin = getattr(packet, overload)
            arguments = twin._schema.arguments
            pure = not any(a.alias_info and a.alias_info.is_write for a in arguments)
            if pure and _same_arguments(wanted, arguments):
                return twin
    raise NotImplementedError(missing(func))


def _same_arguments(wanted: list[Any], arguments: Any) -> bool:
    """Whether a twin takes the same arguments, and beyond them only what to allocate."""
    ours = [(argument.name, str(argument.type)) for argument in wanted]
    twins = [(argument.name, str(argument.type)) for argument in arguments]
    rest = {name for name, _ in twins[len(ours) :]}
    return twins[: len(ours)] == ours and rest <= {"dtype", "layout", "device", "pin_memory"}


_TWINS = {
    "_index_put_impl_": ["index_put"],
    "normal_": ["normal_functional"],
    "rrelu_with_noise_": ["rrelu_with_noise_functional"],
    "__iand__": ["bitwise_and"],
    "__ior__": ["bitwise_or"],
    "__ixor__": ["bitwise_xor"],
    "__ilshift__": ["bitwise_left_shift"],
    "__irshift__": ["bitwise_right_shift"],
}

base.use_handler(handle)
