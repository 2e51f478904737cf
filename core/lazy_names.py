"""Names of a module that are imported at their first use.

The facade has a table of its lazy names. A kit lists what annexes may use of a package of the heart
in a stub, `core/kit.pyi`, which type checkers and editors read, too; at run time `kit.py` reads the
table from it.

>>> stub = "from .layout.mesh import make_mesh as make_mesh"
>>> names = LazyNames.of_stub("isoshard.core.kit", stub)
>>> dir(names), names.load("make_mesh").__module__
(['make_mesh'], 'isoshard.core.layout.mesh')
>>> names.load("make_mash")
Traceback (most recent call last):
    ...
AttributeError: module 'isoshard.core.kit' has no attribute 'make_mash'
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Mapping
from typing import Any


class LazyNames:
    """A table of lazy names.

    Args:
        module: that has the names, for messages.
        sources: for each name a module that has it, or "module:attribute" if it has another name.
    """

    def __init__(self, module: str, sources: Mapping[str, str]):
        """See the class."""
        self._module = module
        self._sources = sources

    @classmethod
    def of_stub(cls, module: str, stub: str) -> LazyNames:
        """The names of a stub, which is of `from .module import name as name` alone."""
        package = module.rpartition(".")[0]
        sources = {
            alias.asname or alias.name: f"{package}.{node.module or ''}".rstrip(".")
            + f":{alias.name}"
            for node in ast.parse(stub).body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        return cls(module, sources)

    def __contains__(self, name: object) -> bool:
        """Whether the table has a name."""
        return name in self._sources

    def load(self, name: str) -> Any:
        """Import the object of a name: an attribute of its module, or a submodule.

        Raises:
            AttributeError: the table does not have the name.
        """
        if name not in self._sources:
            raise AttributeError(f"module {self._module!r} has no attribute {name!r}")
        path, _, attribute = self._sources[name].partition(":")
        module = importlib.import_module(path)
        if hasattr(module, attribute or name):
            return getattr(module, attribute or name)
        return importlib.import_module(f"{path}.{attribute or name}")

    def __dir__(self) -> list[str]:
        """The names."""
        return sorted(self._sources)
