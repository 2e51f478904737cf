"""Automatic mixed precision, by torch_xla's names."""

if __name__ != "isoshard.torch_xla_bridge.torch_xla.amp":
    raise ImportError(f"import isoshard.torch_xla_bridge.torch_xla.amp, not {__name__}")

from .autocast_mode import autocast
from .grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast"]
