"""Memory in use on the devices, as JAX and the operating system report it."""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import jax
import torch

from isoshard.core.layout.virtual_devices import Device

from . import hardware


class MemoryInfo(TypedDict):
    """What `get_memory_info` returns, in bytes."""

    bytes_used: int
    bytes_limit: int
    peak_bytes_used: int


def get_memory_info(device: str | torch.device | None = None) -> MemoryInfo:
    """Used and total memory of a device.

    On accelerators this is JAX's own account. The CPU keeps none: there `bytes_used` are the arrays
    that are alive at the moment (not what a running program needs), `bytes_limit` is the memory of
    the machine, which all virtual devices share, and `peak_bytes_used` is the most that this
    process has had resident, everything included.

    Args:
        device: a chip such as `"TPU:3"`; None or the logical device for the sum over the chips of
            this process (of peaks too, which they need not have reached at the same time).

    Raises:
        RuntimeError: there is no such device.

    >>> sorted(get_memory_info())
    ['bytes_limit', 'bytes_used', 'peak_bytes_used']
    """
    chips = hardware.chips_of(device)
    stats = [chip.memory_stats() for chip in chips]
    if any(stat is None for stat in stats):
        return MemoryInfo(
            bytes_used=_live_bytes(chips), bytes_limit=_machine(), peak_bytes_used=_resident_peak()
        )
    return MemoryInfo(
        bytes_used=sum(stat.get("bytes_in_use", 0) for stat in stats),
        bytes_limit=sum(stat.get("bytes_limit", 0) for stat in stats),
        peak_bytes_used=sum(stat.get("peak_bytes_in_use", 0) for stat in stats),
    )


def fullest_chip() -> tuple[int, int]:
    """Used and total memory of the chip of this process that has the least free, in bytes.

    Virtual devices of the CPU have equal shares of the machine; half of what is available there is
    left to other processes.

    >>> used, total = fullest_chip()
    >>> 0 < used < total <= get_memory_info()["bytes_limit"]
    True
    """
    chips = jax.local_devices()
    stats = [chip.memory_stats() for chip in chips]
    if any(stat is None for stat in stats):
        return (_machine() - _available() // 2) // len(chips), _machine() // len(chips)
    sizes = [(stat.get("bytes_in_use", 0), stat.get("bytes_limit", 0)) for stat in stats]
    return min(sizes, key=lambda size: size[1] - size[0])


def _available() -> int:
    """What processes may still use, as Linux estimates it; elsewhere all but what this one has."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return max(_machine() - _resident_peak(), 0)
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _live_bytes(chips: Sequence[Device]) -> int:
    devices = set(chips)
    return sum(
        len(devices & array.sharding.device_set)
        * math.prod(array.sharding.shard_shape(array.shape))
        * array.dtype.itemsize
        for array in jax.live_arrays()
        if not array.is_deleted()
    )


def _machine() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _resident_peak() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
