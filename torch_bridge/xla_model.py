"""Devices, by torch_xla's names (`import isoshard.torch_bridge.xla_model as xm`)."""

from __future__ import annotations

import jax
import torch

from . import device as _device
from .runtime import sync


def xla_device(n: int | None = None) -> torch.device:
    """The `jax` device: one logical device, however many chips a mesh has.

    Args:
        n: 0 or None.

    Raises:
        ValueError: another number was asked for.
    """
    if n not in (None, 0):
        raise ValueError(
            f"there is one logical device, jax:0, and {n} was asked for; a mesh spreads its "
            "tensors over the chips"
        )
    _device.register()
    return torch.device("jax", 0)


def get_xla_supported_devices(max_devices: int | None = None) -> list[str]:
    """The chips that a mesh can use, such as `["CPU:0", "CPU:1"]`.

    Args:
        max_devices: stop after so many.
    """
    names = [f"{chip.platform.upper()}:{index}" for index, chip in enumerate(jax.devices())]
    return names[:max_devices]


def mark_step(wait: bool = False) -> None:
    """Execute what was recorded; see `isoshard.torch_bridge.sync`."""
    sync(wait=wait)
