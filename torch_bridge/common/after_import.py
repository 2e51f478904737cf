"""Actions that run once a module has been imported, now or later.

>>> done = []
>>> after_import("json", lambda: done.append("json is there"))
>>> done
['json is there']

Nothing is imported for it: a library that a program does not use costs nothing. An import that
fails leaves the action for the next one.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

Action = Callable[[], object]


def after_import(name: str, action: Action) -> None:
    """Call a function as soon as a module has been imported.

    Args:
        name: of the module, in full.
        action: called once; at once if the module is there already.
    """
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _WaitingFinder(name, action))


class _WaitingFinder(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, and acts after it was loaded."""

    def __init__(self, name: str, action: Action):
        self._name, self._action = name, action

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """The spec that others find, for that module alone."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _WaitingLoader(spec.loader, self)
        return spec

    def loaded(self) -> None:
        """The module is there: act, once."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._action()


class _WaitingLoader(importlib.abc.Loader):
    """Loads a module as another does, and then acts."""

    def __init__(self, loader: Any, finder: _WaitingFinder):
        self._loader, self._finder = loader, finder

    def create_module(self, spec: Any) -> Any:
        """As the other does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """As the other does; then the action."""
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.loaded()
