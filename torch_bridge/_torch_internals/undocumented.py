"""Names of torch without an underscore that its documentation does not have.

>>> import torch
>>> with torch.autocast("cpu"):
...     is_autocast_enabled("cpu"), get_autocast_dtype("cpu")
(True, torch.bfloat16)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from .declared import NAMES

DisableTorchFunctionSubclass: Callable[[], AbstractContextManager[Any]] = NAMES.bind(
    "torch.DisableTorchFunctionSubclass",
    why="calls a function of torch below `__torch_function__`",
    without="functions done by a handler, and tensors of `enable_manual_sharding`, raise",
)

is_autocast_enabled: Callable[[str], bool] = NAMES.bind(
    "torch.is_autocast_enabled",
    why="reports whether autocast is on, on which a program depends",
    without="`xs.compile`, `scan_layers` and functions between torch and JAX raise",
)

get_autocast_dtype: Callable[[str], torch.dtype] = NAMES.bind(
    "torch.get_autocast_dtype",
    why="is the dtype that autocast casts to",
    without="operations under `torch.autocast('jax')` raise",
)

caches_casts: Callable[[], bool] = NAMES.bind(
    "torch.is_autocast_cache_enabled",
    otherwise=lambda: True,
    why="reports whether autocast keeps what it has cast, on which a captured step depends",
    without="nothing changes: the device keeps nothing of that kind",
)

SET_AUTOCAST_DTYPE = NAMES.state(
    "torch.set_autocast_dtype",
    why="lets autocast cast to bfloat16, as torch_xla does",
    without="`xs.drop_in.install` raises",
)

is_anomaly_enabled: Callable[[], bool] = NAMES.bind(
    "torch.is_anomaly_enabled",
    otherwise=lambda: False,
    why="reports whether `torch.autograd.set_detect_anomaly` is on: a captured step depends on it",
    without="a step that was captured before it was switched on is replayed without it",
)

has_side_effect: Callable[[Any], Any] = NAMES.bind(
    "torch.fx.node.has_side_effect",
    why="keeps marks whose result is not used in a graph of `torch.compile`",
    without="layouts that a compiled function marks are lost",
)

Uninitialized: Any = NAMES.bind(
    "torch.nn.parameter.UninitializedTensorMixin",
    otherwise=(torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer),
    why="is the class of parameters of lazy modules, which have no shape yet",
    without="nothing changes: it is their two classes",
)

WeakIdKeyDictionary: Callable[[], Any] = NAMES.bind(
    "torch.utils.weak.WeakIdKeyDictionary",
    why="keeps the arrays of tensors that are being loaded",
    without="`torch.load` of tensors of the device raises",
)

WeakTensorKeyDictionary: Callable[[], Any] = NAMES.bind(
    "torch.utils.weak.WeakTensorKeyDictionary",
    why="keeps what is known of a tensor as long as the tensor",
    without="`global_tensor` of a tensor that torch made raises",
)

XPU = NAMES.state(
    "torch.version.xpu",
    substitute=True,
    why="reports whether this torch was built for Intel's GPUs",
    without="`torch.accelerator` does not find them until there is a tensor on `jax`",
)

BACKENDS = NAMES.state(
    "torch.distributed.Backend.backend_list",
    why="lists the backends of process groups, and tells whether `xla` is among them",
    without="importing `isoshard.torch_xla_bridge.torch_xla.distributed.xla_backend` warns, and "
    "`init_process_group('xla')` raises",
)

RENDEZVOUS = NAMES.state(
    "torch.distributed.rendezvous.register_rendezvous_handler",
    why="lets `init_process_group` start from `xla://`",
    without="as without backend_list",
)

is_functorch_wrapped: Callable[[torch.Tensor], bool] = NAMES.bind(
    "torch._C._functorch.is_functorch_wrapped_tensor",
    otherwise=lambda _: False,
    why="knows a tensor under a transformation of `torch.func`",
    without="`iso.torch_function` under `torch.func` raises another error",
)
