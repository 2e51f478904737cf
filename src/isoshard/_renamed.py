"""Modules by the names that they had before: imported under the new name, with a warning.

>>> import warnings
>>> with warnings.catch_warnings(record=True) as told:
...     warnings.simplefilter("always")
...     from isoshard.core.mesh import make_mesh
>>> print(told[0].message)
isoshard.core.mesh is now isoshard.core.layout.mesh; the old form will be removed in the next minor release
"""  # noqa: E501

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

from isoshard.core.deprecations import warn

RENAMED = {
    "isoshard.core.devices": "isoshard.core.layout.virtual_devices",
    "isoshard.core.exchange": "isoshard.core.transfer.exchange",
    "isoshard.core.local": "isoshard.core.transfer.process_local",
    "isoshard.core.mesh": "isoshard.core.layout.mesh",
    "isoshard.core.metrics": "isoshard.core.runtime.metrics",
    "isoshard.core.op_sharding": "isoshard.core.layout.op_sharding",
    "isoshard.core.place": "isoshard.core.transfer.place",
    "isoshard.core.shards": "isoshard.core.layout.shards",
    "isoshard.core.spec": "isoshard.core.layout.spec",
    "isoshard.core.tiles": "isoshard.core.layout.tiles",
    "isoshard.core.uneven": "isoshard.core.layout.uneven",
    "isoshard.core.visualize": "isoshard.core.pictures.visualize",
    "isoshard.jax_bridge.checkpoint": "isoshard.core.checkpoint",
    "isoshard.torch_bridge.crossings": "isoshard.torch_bridge.interop",
}
"""Old name -> new name, of modules whose contents the facade offers as well."""


class OldNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what no other finder knows: a module by the name that it had."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for an old name, after a warning; None for other names."""
        if fullname not in RENAMED:
            return None
        warn(fullname, RENAMED[fullname], stacklevel=2)
        return importlib.machinery.ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        """The old name is the new module from now on."""
        sys.modules[module.__name__] = importlib.import_module(RENAMED[module.__name__])


def install() -> None:
    """Make old names importable, once."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.append(OldNames())
