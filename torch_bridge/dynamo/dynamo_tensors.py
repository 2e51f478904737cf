"""Registration of tensors on the device with dynamo, which traces them as torch's own.

Every trace needs it: `torch.compile` with any backend, and `torch.cond` and its like. It uses only
what dynamo itself has imported by then, as torch imports dynamo in the middle of other imports.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals import dynamo_hooks

from ..device.generator import Generator
from ..tensors.tensor import XLAShardedTensor

_LEFT_ALONE = ("isoshard.core", "isoshard.torch_bridge", "jax")


def _untyped_storage(tensor: XLAShardedTensor) -> Any:
    if dynamo_hooks.current_compilation() is not None:  # dynamo reads its size only
        return torch.Tensor.untyped_storage(tensor)
    return _handle(tensor)


_handle = XLAShardedTensor.untyped_storage


def _as_tangent(tensor: XLAShardedTensor, expected: Any, kind: Any = None) -> XLAShardedTensor:
    """The tensor itself: AOTAutograd traced with plain fake tensors and gets one of ours."""
    return tensor


def _subclass_to_follow(infer: Any) -> Any:
    """Trace torch's own methods: ours differ from them on real tensors only."""
    return lambda value: None if type(value) is XLAShardedTensor else infer(value)


_taught = False


def teach() -> None:
    """Let dynamo trace tensors on the device as torch's own; a second call does nothing."""
    global _taught
    if _taught:
        return
    _taught = True  # what follows imports dynamo, after which this is called again
    tracers = dynamo_hooks.TRACERS.resolve()()
    tracers[XLAShardedTensor] = dynamo_hooks.TRACE_TENSOR.resolve()
    # Dynamo supports the class torch.Generator only; it passes a subclass to C++ as a fake object.
    tracers[Generator] = dynamo_hooks.TRACE_OBJECT.resolve()
    dynamo_hooks.SUBCLASS.wrap(_subclass_to_follow)
    leave_alone = dynamo_hooks.LEAVE_ALONE.resolve(lambda _package: None)
    for package in _LEFT_ALONE:
        leave_alone(package)
    own: Any = XLAShardedTensor
    own.untyped_storage = _untyped_storage
    dynamo_hooks.AS_TANGENT.put(own, _as_tangent)
    if torch.distributed.is_available():  # without it there are no placements either
        importlib.import_module("isoshard.torch_bridge.dynamo.dynamo_layouts").teach(tracers)
