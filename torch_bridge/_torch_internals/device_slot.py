"""Private names by which a device is registered, and torch's lists of supported devices.

>>> device_name()
'jax'
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from .declared import NAMES, NO_DEVICE

device_name: Callable[[], str] = NAMES.bind(
    "torch._C._get_privateuse1_backend_name",
    otherwise=lambda: "privateuseone",
    why="reports whether another package took torch's slot for devices outside its tree",
    without="torch says it, in other words",
)

set_up_device: Callable[[str, Any], None] = NAMES.bind(
    "torch.utils.backend_registration._setup_privateuseone_for_python_backend",
    why="gives the slot to a device written in Python",
    without=NO_DEVICE,
)


def _set_device_module(name: str, module: Any) -> None:
    setattr(torch, name, module)
    sys.modules[f"torch.{name}"] = module


set_device_module: Callable[[str, Any], None] = NAMES.bind(
    "torch._register_device_module",
    otherwise=_set_device_module,
    why="determines where the functions of a device type are (`lazy`, and `xla` by request)",
    without="nothing changes: they are put where torch looks for them",
)

IN_BAD_FORK = NAMES.state(
    "torch.random.manual_seed.<device module>._is_in_bad_fork",
    why="is called on the device's module before it is seeded",
    without="nothing changes: it is not called",
)

OPTIMIZED_TYPES: Any = NAMES.bind(
    "torch.optim.optimizer._foreach_supported_types",
    otherwise=[],
    why="lists the tensor types that optimizers update by one operation for all parameters",
    without="optimizers record an operation per parameter unless given `foreach=True`",
)

CLIPPED_TYPES: Any = NAMES.bind(
    "torch.utils._foreach_utils._foreach_supported_types",
    otherwise=[],
    why="lists those that `clip_grad_norm_` and its kin take together",
    without="they record an operation per parameter",
)

FOREACH_DEVICES = NAMES.state(
    "torch.utils._foreach_utils._get_foreach_kernels_supported_devices",
    why="lists the devices for which they do",
    without="they record an operation per parameter, and reject `foreach=True`",
)

FUSED_DEVICES = NAMES.state(
    "torch.optim.optimizer._get_fused_kernels_supported_devices",
    why="lists the devices that support `fused=True`, `xla` by request among them",
    without="`xs.drop_in.install` raises",
)

device_functions: Callable[[], Any] | None = NAMES.bind(
    "torch.utils._device._device_constructors",
    otherwise=None,
    why="makes torch remember which functions take the device of `with torch.device(..)`",
    without="`torch.as_tensor` and `asarray` copy a tensor that is on the device already",
)

let_scripts_call: Callable[[Callable[..., Any], str], None] = NAMES.bind(
    "torch.jit._builtins._register_builtin",
    otherwise=lambda function, operator: None,
    why="lets `torch.jit.script` take functions that stand for torch's own",
    without="scripts that call `torch.as_tensor` or `torch.autograd.grad` raise",
)
