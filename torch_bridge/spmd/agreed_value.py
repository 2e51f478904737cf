"""The value of a manual tensor, where all devices have the same one.

A script that reads `loss.to_local().item()` under torchrun reads its own rank's value. Here one
process has those of all devices, so it is read where they are equal, and raises where they differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from isoshard.core.layout.virtual_devices import Device
from isoshard.torch_bridge.common.argument_types import DeviceTensor
from isoshard.torch_bridge.layout.shard_snapshots import name_of

HOW = (
    "end the manual region with xs.disable_manual_sharding(t, spec, full_shape) or "
    "DTensor.from_local(t, mesh, placements), or read all shards: "
    "[shard.data for shard in t.local_shards]"
)
"""What to do instead of reading a value that differs between devices."""


def agreed(stacked: DeviceTensor, devices: Sequence[Device]) -> torch.Tensor:
    """The shard that every device has, on the CPU; executes recorded operations.

    Args:
        stacked: the shards, of shape (devices, *shape).
        devices: of the shards.

    Raises:
        RuntimeError: the shards of two devices differ. NaNs are equal here.
    """
    shards = stacked.detach().cpu()
    first = shards[0]
    for shard, device in zip(shards[1:], devices[1:], strict=True):
        if not _same(first, shard):
            raise RuntimeError(
                f"a manual tensor has a value per device, and those of shape {tuple(first.shape)} "
                f"on {name_of(devices[0])} and {name_of(device)} differ, so it cannot be read; "
                f"{HOW}"
            )
    return first


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all elements are equal; NaN is equal to NaN."""
    return bool(((a == b) | ((a != a) & (b != b))).all())
