"""Warnings where automatic sharding is requested and cannot be done.

A plan is found for a step that is compiled as one program. A script that trains without compiling a
step gets one warning, and the report has a line on it until a step is compiled.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from isoshard.core.errors import CodedWarning
from isoshard.core.runtime import metrics
from isoshard.torch_bridge.engine.recording.lazy_tensor import LazyTensor
from isoshard.torch_bridge.engine.recording.recorder import recorder


class UnplannedWarning(CodedWarning, code="ISO046"):
    """Automatic sharding was requested, and a step cannot be planned."""


_MODE = "use_spmd(auto=True)"
_hooks: list[Any] = []


def watch() -> None:
    """Report that no step was compiled so far, and warn if an optimizer steps before one is."""
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_stepped))
        metrics.record_plan(_MODE, f"none so far, as {_FEW}")


def compiled() -> None:
    """Remove the report's line and the hook: a compiled step has a line of its own."""
    metrics.record_plan(_MODE, None)
    while _hooks:
        _hooks.pop().remove()


def warn_unplanned(where: str, reason: str) -> None:
    """Warn of a step that cannot be planned, and report it."""
    metrics.record_plan(where, f"none: {reason}")
    warnings.warn(
        f"{where}: automatic sharding cannot plan this step: {reason} Its tensors are sharded as "
        "they are marked.",
        UnplannedWarning,
        stacklevel=2,
    )


_FEW = (
    "no step was compiled; wrap it in torch_xla.compile(step), or in "
    "isoshard.torch_bridge.compile(step), and its first call finds the shardings"
)


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    on_device = any(isinstance(p, LazyTensor) for g in optimizer.param_groups for p in g["params"])
    if on_device and not recorder().plans:
        while _hooks:
            _hooks.pop().remove()
        warnings.warn(
            f"{metrics.user_location()}: {_MODE} shards nothing here: {_FEW}.",
            UnplannedWarning,
            stacklevel=2,
        )
