"""Functions that record an entry of the tape, as operators in graphs that torch traces.

A constraint, and splitting and joining shards, are functions of one tensor and some constants that
record an entry of the tape. `torch.compile` traces with tensors that have no value, so there such a
function becomes a node, `torch.ops.isoshard.layout(tensor, call_id)`, which calls it when the graph
runs. Both have the same `torch.autograd.Function`, and so the same gradient.

>>> def scaled(t, times):
...     return t * times
>>> record_or_trace(scaled, same_shape, torch.ones(2, device="jax"), 2)
tensor([2., 2.], device='jax:0')

Equal functions and constants have one id. They are never removed: there are as many as a program
has shardings.
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
_IDS: dict[_GraphCall, int] = {}
_IDS_LOCK = threading.Lock()

_LIBRARY = torch.library.Library("isoshard", "DEF")  # for the life of the process
_LIBRARY.define("layout(Tensor t, int call) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define("mark(Tensor t, int call) -> ()", tags=(torch.Tag.pt2_compliant_tag,))


def record_or_trace(
    record: Callable[..., Any],
    shape: Callable[..., Sequence[int]],
    tensor: DeviceTensor,
    *constants: Opaque,
) -> Any:
    """`record(tensor, *constants)`, or its node where torch traces.

    Args:
        record: makes a new tensor of one on the `jax` device; below autograd.
        shape: of the result, `shape(shape of the tensor, *constants)`.
        tensor: on the `jax` device, or traced by torch.
        *constants: hashable.
    """
    if isinstance(tensor, lazy_tensor.LazyTensor):
        return record(tensor, *constants)
    call_id = _id_of(_GraphCall(record, shape, constants))
    return torch.ops.isoshard.layout.default(tensor, call_id)


def mark_or_trace(record: Callable[..., Any], tensor: DeviceTensor, *constants: Opaque) -> None:
    """`record(tensor, *constants)`, or its node where torch traces.

    Args:
        record: annotates the tensor, and changes no element.
        tensor: on the `jax` device, or traced by torch.
        *constants: hashable.
    """
    if isinstance(tensor, lazy_tensor.LazyTensor):
        record(tensor, *constants)
    else:
        call_id = _id_of(_GraphCall(record, same_shape, constants))
        torch.ops.isoshard.mark.default(tensor, call_id)


def _id_of(call: _GraphCall) -> int:
    with _IDS_LOCK:
        call_id = _IDS.setdefault(call, len(_CALLS))
        if call_id == len(_CALLS):
            _CALLS.append(call)
    return call_id


def same_shape(shape: Shape, *_: Opaque) -> Shape:
    """The shape of a result that has the shape of its operand."""
    return shape


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one on the device as torch traces it, without a value."""
    ours = tensor.device.type in naming.OURS
    return ours and not isinstance(tensor, lazy_tensor.LazyTensor)


def _run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, call_id = args
    call = _CALLS[call_id]
    return call.record(tensor, *call.constants)


def _run_mark(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _run(args, kwargs)


def _fake_result(tensor: torch.Tensor, call_id: int) -> torch.Tensor:
    call = _CALLS[call_id]
    return tensor.new_empty(tuple(call.shape(tuple(tensor.shape), *call.constants)))


SPECIAL["isoshard::layout"] = _run
SPECIAL["isoshard::mark"] = _run_mark
torch.library.register_fake("isoshard::layout", _fake_result, lib=_LIBRARY)
torch.library.register_fake("isoshard::mark", lambda tensor, call_id: None, lib=_LIBRARY)
with optional():
    has_side_effect(torch.ops.isoshard.mark.default)
