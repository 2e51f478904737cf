"""The value of a manual tensor, where all devices have the same one.

A script that reads `loss.to_local().item()` under torchrun reads its own rank's. One process has
them all, so the value is the one on which the devices agree; there is none where they differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from isoshard.core.layout.virtual_devices import Device
from isoshard.torch_bridge.common.argument_types import DeviceTensor
from isoshard.torch_bridge.layout.shard_snapshots import name_of

HOW = (
    "end the manual region with xs.disable_manual_sharding(t, spec, full_shape) or "
    "DTensor.from_local(t, mesh, placements), or read the pieces: [shard.data for shard in "
    "t.local_shards]"
)
"""What to do instead of reading a value that there are many of."""


def agreed(stacked: DeviceTensor, devices: Sequence[Device]) -> torch.Tensor:
    """The piece that every device has, on the CPU; executes what is recorded.

    Args:
        stacked: the pieces, of shape (devices, *shape).
        devices: those of the pieces.

    Raises:
        RuntimeError: two devices have another piece. NaNs are equal here.
    """
    pieces = stacked.detach().cpu()
    first = pieces[0]
    for piece, device in zip(pieces[1:], devices[1:], strict=True):
        if not _same(first, piece):
            raise RuntimeError(
                f"a manual tensor has a value per device, and those of shape {tuple(first.shape)} "
                f"on {name_of(devices[0])} and {name_of(device)} differ, so it cannot be read as "
                f"one; {HOW}"
            )
    return first


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all elements are equal; NaN is equal to NaN."""
    return bool(((a == b) | ((a != a) & (b != b))).all())
