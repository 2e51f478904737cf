"""Functionalization: an in-place or `out=` operator as one that writes nothing.

JAX arrays never change, so `x.add_(y)` is computed by `aten.add`, and its result becomes the new
value of the memory behind `x`. torch gives the two one name but does not link them: the functional
one is found by its name, and recognised by its arguments.

>>> print(functional_overload(torch.ops.aten.add_.Tensor))
aten.add.Tensor
>>> print(functional_overload(torch.ops.aten.sum.IntList_out))
aten.sum.dim_IntList
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals import OpOverload, schema_of
from isoshard.torch_bridge.engine.signatures.shape_inference import missing

_RENAMED = {
    "_index_put_impl_": ["index_put"],
    "normal_": ["normal_functional"],
    "rrelu_with_noise_": ["rrelu_with_noise_functional"],
    "__iand__": ["bitwise_and"],
    "__ior__": ["bitwise_or"],
    "__ixor__": ["bitwise_xor"],
    "__ilshift__": ["bitwise_left_shift"],
    "__irshift__": ["bitwise_right_shift"],
}


def functional_overload(func: OpOverload) -> OpOverload:
    """The overload that computes what an in-place or `out=` overload writes.

    That of an `out=` overload may write to the arguments to which both write, as a batch norm to
    its running statistics.

    Raises:
        NotImplementedError: there is none.
    """
    schema = schema_of(func)
    packet_name = schema.name.removeprefix("aten::")
    candidates = _RENAMED.get(packet_name, [packet_name.removesuffix("_"), packet_name.strip("_")])
    inputs = [argument for argument in schema.arguments if not argument.is_out]
    shared = set(written(inputs) if len(inputs) < len(schema.arguments) else ())
    for name in candidates:
        packet = getattr(torch.ops.aten, name, None)
        if packet is None:
            continue
        ranked = sorted(packet.overloads(), key=lambda overload: overload != schema.overload_name)
        for overload in ranked:
            candidate = getattr(packet, overload)
            arguments = schema_of(candidate).arguments
            if set(written(arguments)) <= shared and _same_arguments(inputs, arguments):
                return candidate
    raise NotImplementedError(missing(func))


def written(arguments: Iterable[Any]) -> list[str]:
    """Names of the arguments of a schema that the operator writes to.

    >>> written(schema_of(torch.ops.aten.add_.Tensor).arguments)
    ['self']
    """
    return [a.name for a in arguments if a.alias_info and a.alias_info.is_write]


def _same_arguments(inputs: list[Any], arguments: Any) -> bool:
    """Whether an overload takes these arguments, and beyond them only what to allocate."""
    ours = [(argument.name, str(argument.type)) for argument in inputs]
    theirs = [(argument.name, str(argument.type)) for argument in arguments]
    rest = {name for name, _ in theirs[len(ours) :]}
    return theirs[: len(ours)] == ours and rest <= {"dtype", "layout", "device", "pin_memory"}


def lost_defaults(func: OpOverload, functional: OpOverload) -> list[tuple[int, str, Any]]:
    """Arguments that may be left out of the in-place overload, but not of the functional one."""
    theirs = {argument.name: argument for argument in schema_of(functional).arguments}
    return [
        (index, argument.name, argument.default_value)
        for index, argument in enumerate(schema_of(func).arguments)
        if argument.has_default_value() and not theirs[argument.name].has_default_value()
    ]
