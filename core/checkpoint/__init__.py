"""One checkpoint for both frameworks: `iso.save` and `iso.restore`.

>>> import tempfile, jax, numpy as np
>>> with tempfile.TemporaryDirectory() as folder:
...     saving = save(folder, {"params": {"w": np.ones((8, 4), np.float32)}, "epoch": 3}, step=100)
...     restore(folder, {"params": {"w": np.zeros((8, 4), np.float32)}, "epoch": 0})["epoch"]
3

A checkpoint has leaves by name, without their framework, mesh or sharding. Trees of torch modules,
Flax modules, optimizers and arrays go through the registry of core, so this package imports no
framework but JAX.
"""

if __name__ != "isoshard.core.checkpoint":
    raise ImportError(f"import isoshard.core.checkpoint, not {__name__}")

from .opening import latest, opened
from .restoring import restore
from .saving import Saving, save
from .storage_check import StorageCheck, check_storage

__all__ = ["Saving", "StorageCheck", "check_storage", "latest", "opened", "restore", "save"]
