"""The chips behind the one logical device, by torch_xla's names.

To its user a mesh is one device, whatever number of chips it has; the chips have names of their
own, which meshes number and shards report.

>>> import jax
>>> xla_device(), get_xla_supported_devices()
(device(type='jax', index=0), ['jax:0'])
>>> chip_names()[:3], kind(jax.devices()[0])
(['CPU:0', 'CPU:1', 'CPU:2'], 'CPU')
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import jax
import torch

from isoshard.core.layout.virtual_devices import Device
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.engine.recording import lazy_tensor

from ..spmd.modes import is_spmd

_KINDS = {"gpu": "CUDA", "cuda": "CUDA", "rocm": "ROCM"}


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """The logical device: one, however many chips a mesh has.

    Args:
        n: 0 or None. After `runtime.use_spmd()` any number, as in torch_xla.
        devkind: not used; torch_xla has it for older scripts.

    Returns:
        The device.

    Raises:
        IndexError: `n` is another number, and SPMD mode is off.

    Example:
        >>> torch.ones(2, device=xla_device()).device
        device(type='jax', index=0)
    """
    if n not in (None, 0) and not is_spmd():
        raise IndexError(
            f"there is one logical device, {naming.current()}, and index {n} was requested; a mesh "
            "shards its tensors over the chips. Call runtime.use_spmd() first to let every index "
            "name it."
        )
    lazy_tensor.choose()
    return naming.current()


def get_xla_supported_devices(max_devices: int | str | None = None) -> list[str]:
    """The logical devices: a list of one.

    The chips are counted by `runtime.global_runtime_device_count()`, and named by
    `torch_xla.real_devices()`.

    Args:
        max_devices: stop after so many. As in older versions of torch_xla also the kind of the
            chips, such as "CPU"; of another kind there are none.

    Returns:
        The name of the device, or nothing.

    Example:
        >>> get_xla_supported_devices(), get_xla_supported_devices("TPU")
        (['jax:0'], [])
    """
    if isinstance(max_devices, str):
        return [str(naming.current())] if kind(jax.devices()[0]) == max_devices else []
    return [str(naming.current())][: max_devices or None]


def kind(device: Device) -> str:
    """The kind of a chip by torch_xla's names: `"CPU"`, `"TPU"`, `"CUDA"`.

    Args:
        device: one of `jax.devices()`.
    """
    platform: str = device.platform
    return _KINDS.get(platform, platform.upper())


def chip_names(chips: Sequence[Device] | None = None) -> list[str]:
    """Names such as `"CPU:0"`, numbered by position in `jax.devices()`.

    Args:
        chips: which; all by default.
    """
    positions = {device: position for position, device in enumerate(jax.devices())}
    return [f"{kind(device)}:{positions[device]}" for device in chips or positions]


def chips_of(device: str | torch.device | None) -> list[Device]:
    """The chips of a device by name: this process's for the logical device, or one.

    Args:
        device: the logical device, None, or the name of a chip such as `"CPU:3"`.

    Raises:
        RuntimeError: there is no such device.
    """
    if device is None or str(device).partition(":")[0] in naming.OURS:
        return list(jax.local_devices())
    names = chip_names()
    if re.fullmatch(r"[A-Z]+:\d+", str(device)) and str(device) in names:
        return [jax.devices()[names.index(str(device))]]
    raise RuntimeError(
        f"there is no device {str(device)!r}; there are {naming.current()}, the logical one, and "
        f"the chips {names[0]} to {names[-1]}"
    )
