"""Automatic sharding says so where it decides nothing.

A plan is found for a step that is compiled as a whole. A script that trains without compiling a
step is told once, and the report says it until a step was compiled.
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
    """A layout was to be found automatically, and a step says too little for that."""


_MODE = "use_spmd(auto=True)"
_hooks: list[Any] = []


def watch() -> None:
    """Note that no step was compiled so far, and warn if an optimizer steps meanwhile."""
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_stepped))
        metrics.record_plan(_MODE, f"none so far, as {_FEW}")


def compiled() -> None:
    """Note that a step was compiled: its own line in the report says what became of it."""
    metrics.record_plan(_MODE, None)
    while _hooks:
        _hooks.pop().remove()


def tell(where: str, reason: str) -> None:
    """Warn of a step that cannot be planned, and say so in the report.

    Args:
        where: the step's line.
        reason: why.
    """
    metrics.record_plan(where, f"none: {reason}")
    warnings.warn(
        f"{where}: the step is to be laid out automatically and cannot be planned: {reason} "
        "Its tensors stay as they are marked.",
        UnplannedWarning,
        stacklevel=2,
    )


_FEW = (
    "no step was compiled as a whole; wrap it in torch_xla.compile(step), or in "
    "isoshard.torch_bridge.compile(step), and its first call finds the layouts"
)


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    on_device = any(isinstance(p, LazyTensor) for g in optimizer.param_groups for p in g["params"])
    if on_device and not recorder().plans:
        while _hooks:
            _hooks.pop().remove()
        warnings.warn(
            f"{metrics.user_location()}: {_MODE} lays nothing out here: {_FEW}.",
            UnplannedWarning,
            stacklevel=2,
        )
