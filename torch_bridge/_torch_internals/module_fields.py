"""Private fields of modules, optimizers' helpers and gradient scalers.

>>> import torch
>>> layer = torch.nn.Linear(2, 1)
>>> list(own_parameters(layer)), list(own_modules(torch.nn.Sequential(layer)))
(['weight', 'bias'], ['0'])
>>> [*forward_pre_hooks(layer), *forward_hooks(layer)]
[]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .declared import NAMES

_Fields = Callable[[torch.nn.Module], dict[str, Any]]

own_parameters: _Fields = NAMES.field(
    "torch.nn.Module._parameters",
    example=torch.nn.Module,
    why="has a module's own parameters, to be read and replaced without a search",
    without="as without _apply",
)

own_buffers: _Fields = NAMES.field(
    "torch.nn.Module._buffers",
    example=torch.nn.Module,
    why="has a module's own buffers",
    without="`xs.compile`, `scan_layers` and loading weights raise",
)

own_modules: _Fields = NAMES.field(
    "torch.nn.Module._modules",
    example=torch.nn.Module,
    why="has a module's children, one under two names twice",
    without="`xs.compile` and `scan_layers` of modules raise",
)

forward_hooks: Callable[[torch.nn.Module], dict[int, Any]] = NAMES.field(
    "torch.nn.Module._forward_hooks",
    example=torch.nn.Module,
    why="has the hooks after `forward`",
    without="`scan_layers`, and the export of sharded modules to ONNX, raise",
)

forward_pre_hooks: Callable[[torch.nn.Module], dict[int, Any]] = NAMES.field(
    "torch.nn.Module._forward_pre_hooks",
    example=torch.nn.Module,
    why="has the hooks before `forward`",
    without="as without _forward_hooks",
)

LOAD = NAMES.state(
    "torch.nn.Module._load_from_state_dict",
    why="is called on each module that a state dict is loaded into, and unstacks stacked layers",
    without="state dicts of scanned layers are loaded by the names of the stack only",
)

APPLY = NAMES.state(
    "torch.nn.Module._apply",
    why="is the way of `to`, `cpu` and their like, wrapped so that parameters stay themselves",
    without="moving a module to the device makes new parameters: make the optimizer after it",
)

state_versions: Callable[[Any], dict[str, Any]] = NAMES.field(
    "torch.nn.Module.state_dict._metadata",
    example=lambda: torch.nn.Module().state_dict(),
    why="has the versions of the modules in a state dict",
    without="`state_dict` of scanned layers raises",
)

SCALER_FIRST_USE = NAMES.state(
    "torch.amp.GradScaler._lazy_init_scale_growth_tracker",
    why="makes a scaler's scale, which a captured step must find made",
    without="`xs.compile` of a step with a scaler raises",
)

SCALER_STEP = NAMES.state(
    "torch.amp.GradScaler._maybe_opt_step",
    why="decides on the host whether to step, which raises in a captured step",
    without="`xs.compile` of a step with a scaler raises",
)

SCALE = NAMES.state(
    "torch.amp.GradScaler._scale",
    why="is a scaler's scale, which a captured step must find made",
    without="`xs.compile` of a step with a scaler raises",
)

GROWTH = NAMES.state(
    "torch.amp.GradScaler._growth_tracker",
    why="counts a scaler's steps without an infinity",
    without="a scaler that is used first in a captured step keeps no count",
)

scaler_states: Callable[[Any], dict[Any, Any]] = NAMES.field(
    "torch.amp.GradScaler._per_optimizer_states",
    example=lambda: torch.amp.GradScaler("cpu"),
    why="reports which optimizers' gradients were unscaled",
    without="`xs.compile` of a step with a scaler raises",
)

ADAFACTOR = {
    name: NAMES.state(
        f"torch.optim._adafactor.{name}",
        why="updates parameters by norms that it reads on the host, which a captured step cannot",
        without="`torch.optim.Adafactor` reads a norm for each parameter, and `xs.compile` raises",
    )
    for name in ("_single_tensor_adafactor", "_multi_tensor_adafactor")
}
