"""Batches read and uploaded in the background: `ParallelLoader`, `MpDeviceLoader`."""

from isoshard.torch_xla_bridge.loading import (
    MpDeviceLoader,
    ParallelLoader,
    PerDeviceLoader,
    PerDeviceQueue,
)

__all__ = ["MpDeviceLoader", "ParallelLoader", "PerDeviceLoader", "PerDeviceQueue"]
