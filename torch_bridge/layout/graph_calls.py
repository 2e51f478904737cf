"""What records an entry by hand, as one operator of a graph that torch traces.

A constraint, a cut into pieces and their joining are functions of one tensor and some constants,
and write an entry on the tape. `torch.compile` traces with tensors that have no value, so there the
function becomes a node, `torch.ops.isoshard.layout(tensor, number)`. When the graph runs, the node
calls the function. So the gradient of either is the same `torch.autograd.Function`.

>>> def scaled(t, times):
...     return t * times
>>> laid_by(scaled, same_shape, torch.ones(2, device="jax"), 2)
tensor([2., 2.], device='jax:0')

Number and function are one for equal constants, which are kept for the life of the process: there
are as many as a program names layouts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from isoshard.core.runtime.private_names import optional
from isoshard.torch_bridge._torch_internals.undocumented import has_side_effect
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.common.argument_types import DeviceTensor, Opaque
from isoshard.torch_bridge.engine.operators.dispatch import SPECIAL
from isoshard.torch_bridge.engine.recording import lazy_tensor

Shape = tuple[int, ...]


class _GraphCall(NamedTuple):
    record: Callable[..., Any]
    shape: Callable[..., Sequence[int]]
    constants: tuple[Any, ...]


_CALLS: list[_GraphCall] = []
_NUMBERS: dict[_GraphCall, int] = {}
_NUMBERING = threading.Lock()

_LIBRARY = torch.library.Library("isoshard", "DEF")  # for the life of the process
_LIBRARY.define("layout(Tensor t, int call) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define("mark(Tensor t, int call) -> ()", tags=(torch.Tag.pt2_compliant_tag,))


def laid_by(
    record: Callable[..., Any],
    shape: Callable[..., Sequence[int]],
    tensor: DeviceTensor,
    *constants: Opaque,
) -> Any:
    """`record(tensor, *constants)`, or its node where torch traces.

    Args:
        record: makes a new tensor of one on the `jax` device; below autograd.
        shape: of the result, `shape(shape of the tensor, *constants)`.
        tensor: on the `jax` device, or the one that torch traces in its place.
        *constants: hashable.
    """
    if isinstance(tensor, lazy_tensor.LazyTensor):
        return record(tensor, *constants)
    number = _number(_GraphCall(record, shape, constants))
    return torch.ops.isoshard.layout.default(tensor, number)


def mark_by(record: Callable[..., Any], tensor: DeviceTensor, *constants: Opaque) -> None:
    """`record(tensor, *constants)`, or its node where torch traces.

    Args:
        record: says something of the tensor, and changes no element.
        tensor: on the `jax` device, or the one that torch traces in its place.
        *constants: hashable.
    """
    if isinstance(tensor, lazy_tensor.LazyTensor):
        record(tensor, *constants)
    else:
        number = _number(_GraphCall(record, same_shape, constants))
        torch.ops.isoshard.mark.default(tensor, number)


def _number(call: _GraphCall) -> int:
    with _NUMBERING:
        number = _NUMBERS.setdefault(call, len(_CALLS))
        if number == len(_CALLS):
            _CALLS.append(call)
    return number


def same_shape(shape: Shape, *_: Opaque) -> Shape:
    """The shape of a result that has its operand's."""
    return shape


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for one on the device, in a graph that torch traces."""
    ours = tensor.device.type in naming.OURS
    return ours and not isinstance(tensor, lazy_tensor.LazyTensor)


def _run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, number = args
    call = _CALLS[number]
    return call.record(tensor, *call.constants)


def _run_mark(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _run(args, kwargs)


def _alike(tensor: torch.Tensor, number: int) -> torch.Tensor:
    call = _CALLS[number]
    return tensor.new_empty(tuple(call.shape(tuple(tensor.shape), *call.constants)))


SPECIAL["isoshard::layout"] = _run
SPECIAL["isoshard::mark"] = _run_mark
torch.library.register_fake("isoshard::layout", _alike, lib=_LIBRARY)
torch.library.register_fake("isoshard::mark", lambda tensor, number: None, lib=_LIBRARY)
with optional():
    has_side_effect(torch.ops.isoshard.mark.default)
