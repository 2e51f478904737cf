"""Checkpoints: `iso.save`, `iso.restore`, `iso.latest`, and what surrounds them.

>>> import tempfile
>>> import isoshard as iso
>>> with tempfile.TemporaryDirectory() as folder:
...     _ = iso.checkpoint.check_storage(folder, nbytes=4096)
...     _ = iso.save(folder, {"epoch": 3}, step=10)
...     iso.latest(folder), iso.restore(folder, {"epoch": 0})
(10, {'epoch': 3})
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from isoshard.core.checkpoint import check_storage, latest, restore, save

if TYPE_CHECKING:
    from isoshard.torch_bridge.dtensor.array_loading import load_arrays

__all__ = ["check_storage", "latest", "load_arrays", "restore", "save"]


def __getattr__(name: str) -> Any:
    """Load what needs torch when it is first named."""
    if name == "load_arrays":
        return importlib.import_module("isoshard.torch_bridge.dtensor.array_loading").load_arrays
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, those not loaded yet included."""
    return sorted(__all__)
