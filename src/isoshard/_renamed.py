"""Modules by the names that they had before: imported under the new name.

Renamed ones warn; what users import goes on under its name wherever its folder is.

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
import importlib.util
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
    "isoshard.core.place": "isoshard.core.transfer.device_put",
    "isoshard.core.shards": "isoshard.core.layout.shards",
    "isoshard.core.spec": "isoshard.core.layout.spec",
    "isoshard.core.tiles": "isoshard.core.layout.tiles",
    "isoshard.core.uneven": "isoshard.core.layout.uneven",
    "isoshard.core.visualize": "isoshard.core.pictures.visualize",
    "isoshard.jax_bridge.checkpoint": "isoshard.core.checkpoint",
    "isoshard.torch_bridge.crossings": "isoshard.torch_bridge.interop",
}
"""Old name -> new name, of modules whose contents the facade offers as well."""


MOVED = {
    "isoshard.core.domain": "isoshard.domain",
    "isoshard.core.planner": "isoshard.planner",
    "isoshard.torch_bridge.drop_in": "isoshard.torch_xla_bridge.drop_in",
    "isoshard.torch_bridge.torch_xla": "isoshard.torch_xla_bridge.torch_xla",
    "isoshard.torch_bridge.torch_xla_backend": "isoshard.torch_xla_bridge.torch_xla_backend",
}
"""What users import -> the package or module that it is; modules inside a package likewise."""


def _moved(name: str) -> str | None:
    names = name.split(".")
    for count in range(len(names), 2, -1):
        moved = MOVED.get(".".join(names[:count]))
        if moved is not None:
            return ".".join((moved, *names[count:]))
    return None


class OldNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: modules by their old names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for an old name, after a warning if it was renamed; None for other names."""
        moved = _moved(fullname) if fullname.startswith("isoshard.") else None
        if moved is not None and importlib.util.find_spec(moved) is not None:
            return importlib.machinery.ModuleSpec(fullname, self)
        if fullname not in RENAMED:
            return None
        warn(fullname, RENAMED[fullname], stacklevel=2)
        return importlib.machinery.ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        """The old name is the new module from now on."""
        name = module.__name__
        sys.modules[name] = importlib.import_module(_moved(name) or RENAMED[name])


def install() -> None:
    """Make old names importable, once."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        # First: a moved package has its new folder as its path, where Python would find its modules
        # again, under their old names.
        sys.meta_path.insert(0, OldNames())
