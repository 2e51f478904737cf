"""Submodules that are imported at their first use.

After `import torch_xla` a script may write `torch_xla.distributed.spmd.Mesh`. Loading everything
for that would be slow, so a package has a `__getattr__` that imports the submodule.

>>> import sys, types
>>> package = types.ModuleType("json")
>>> package.__getattr__ = submodules("json", ["decoder"])
>>> package.decoder.__name__
'json.decoder'
>>> package.other
Traceback (most recent call last):
    ...
AttributeError: module 'json' has no attribute 'other'
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any


def submodules(
    package: str, names: Collection[str], members: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """A `__getattr__` for a package."""
    members = members or {}

    def getattr_(name: str) -> Any:
        if name in names:
            return importlib.import_module(f"{package}.{name}")
        if name in members:
            return getattr(importlib.import_module(f"{package}.{members[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return getattr_
