"""Names of a module that are imported at their first use, as its stub lists them.

A kit lists what annexes may use of a package of the heart: `core/kit.pyi`. The stub is what type
checkers and editors read; at run time `kit.py` finds in it where each name is.

>>> names = LazyNames("isoshard.core", 'from .layout.mesh import make_mesh as make_mesh')
>>> dir(names), names.load("make_mesh").__module__
(['make_mesh'], 'isoshard.core.layout.mesh')
>>> names.load("make_mash")
Traceback (most recent call last):
    ...
AttributeError: isoshard.core.kit lists no 'make_mash'
"""

from __future__ import annotations

import ast
import importlib
from typing import Any


class LazyNames:
    """The names of a stub.

    Args:
        package: that the stub's relative imports start from.
        stub: its text, of `from .module import name as name` alone.
    """

    def __init__(self, package: str, stub: str):
        """See the class."""
        self._package = package
        self._sources: dict[str, tuple[str, str]] = {}
        for node in ast.parse(stub).body:
            if isinstance(node, ast.ImportFrom):
                module = ".".join(filter(None, (package, node.module)))
                for alias in node.names:
                    self._sources[alias.asname or alias.name] = module, alias.name

    def load(self, name: str) -> Any:
        """Import what a name stands for.

        Raises:
            AttributeError: the stub does not list it.
        """
        if name not in self._sources:
            raise AttributeError(f"{self._package}.kit lists no {name!r}")
        module, attribute = self._sources[name]
        value = importlib.import_module(module)
        if hasattr(value, attribute):
            return getattr(value, attribute)
        return importlib.import_module(f"{module}.{attribute}")

    def __dir__(self) -> list[str]:
        """The names."""
        return sorted(self._sources)
