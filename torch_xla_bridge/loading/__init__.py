"""Loaders that read, split and upload batches in the background."""

if __name__ != "isoshard.torch_xla_bridge.loading":
    raise ImportError(
        f"import isoshard.torch_xla_bridge.loading, not {__name__}: pip install -e . first"
    )

from .loader import MpDeviceLoader, ParallelLoader, PerDeviceLoader, PerDeviceQueue
from .upload import Uploader

__all__ = ["MpDeviceLoader", "ParallelLoader", "PerDeviceLoader", "PerDeviceQueue", "Uploader"]
