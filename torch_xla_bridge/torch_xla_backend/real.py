"""torch_xla itself, imported when it is first needed."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from isoshard.core.kit import ShardingError


def load(module: str = "torch_xla") -> Any:
    """Import torch_xla, or a module of it.

    Args:
        module: its full name.

    Raises:
        ImportError: it is not installed, or its name stands for isoshard's own.

    >>> load("torch_xla.runtime")
    Traceback (most recent call last):
        ...
    ImportError: torch_xla is not installed here. Its last release goes with torch 2.9: \
pip install torch==2.9.0 torch_xla==2.9.0, in an environment of its own.
    """
    present = sys.modules.get("torch_xla")
    if present is not None and present.__name__ != "torch_xla":
        raise ImportError(
            "torch_xla means isoshard's own modules in this process, whose tensors isoshard's "
            "verbs take as they are; torch_xla_backend is for the real torch_xla. Leave out "
            "isoshard.torch_xla_bridge.drop_in.install() or `isoshard run-torch-xla`."
        )
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "torch_xla":
            raise
        raise ImportError(
            "torch_xla is not installed here. Its last release goes with torch 2.9: pip install "
            "torch==2.9.0 torch_xla==2.9.0, in an environment of its own."
        ) from None


def is_spmd() -> bool:
    """Whether torch_xla shards: `torch_xla.runtime.use_spmd()` was called."""
    return load("torch_xla.runtime").is_spmd()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, without torch_xla's wrapper and without its gradient."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "xla":
        where = f"on {tensor.device}" if isinstance(tensor, torch.Tensor) else "no tensor"
        raise ShardingError(
            f"torch_xla_backend takes tensors on torch_xla's device, and this "
            f"{type(tensor).__name__} is {where}. Move it with t.to('xla')."
        )
    if isinstance(tensor, load("torch_xla.distributed.spmd").XLAShardedTensor):
        tensor = tensor.global_tensor
    return tensor.detach()


def execute(bare: torch.Tensor) -> None:
    """Execute what a tensor waits for, and wait until its data is there.

    torch_xla ends the process when data is asked for that is not there, and its `sync` alone gives
    data neither to every tensor nor at once.
    """
    model = load("torch_xla.core.xla_model")
    model.unlazy([bare])
    model.wait_device_ops()
