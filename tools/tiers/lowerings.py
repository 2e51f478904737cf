"""Which files registered the operators that run: a row of a table executes nowhere by itself.

Many operators are a row, `"sin": jnp.sin`, of a table in a lowering file; what runs is JAX's code,
or that of a helper in another file. So it is noted which files take part when a lowering is
registered, and each lowering is made to note its name when it runs.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from .sources import ours

_PACKAGE = "isoshard.torch_bridge"
_REGISTRY = "torch_bridge/lowerings/registry.py"


class Lowerings:
    """All lowerings of this process, which from now on note that they ran.

    Attributes:
        origins: name, such as `aten::add.Tensor` -> the files that took part in registering it.
        ran: the names of those that ran; clear it as you like.
    """

    def __init__(self) -> None:
        """Import the torch bridge, and wrap the function of every lowering.

        Raises:
            RuntimeError: the bridge has been imported before, unseen.
        """
        if _PACKAGE in sys.modules:
            raise RuntimeError(
                f"{_PACKAGE} has been imported before its lowerings could be watched: make "
                "Lowerings() first"
            )
        self.origins: dict[str, set[str]] = {}
        self.ran: set[str] = set()
        before = sys.gettrace()
        sys.settrace(self._importing)
        try:
            importlib.import_module(_PACKAGE)
            registry = importlib.import_module(f"{_PACKAGE}.lowerings.registry")
        finally:
            sys.settrace(before)
        for name in registry.names():
            known = registry.named(name)
            noting = dataclasses.replace(known, function=self._noting(name, known.function))
            registry._TABLE[name] = noting

    @property
    def files(self) -> set[str]:
        """The files that registered what ran."""
        return set().union(*(self.origins.get(name, ()) for name in self.ran))

    def registering(self, operator: str) -> set[str]:
        """The files that register what bears an operator's name: `nn.functional.gelu`, `var.dim`.

        Args:
            operator: a dotted name; namespaces before it and a variant after it do no harm.

        Returns:
            The files; none for an operator that only decomposes.
        """
        parts = [part.strip("_") for part in operator.split(".")]
        wanted = {"_".join(parts[start:]) for start in range(len(parts))}
        wanted |= {"_".join(parts[:-1])} | {parts[0]}
        found: set[str] = set()
        for name, files in self.origins.items():
            if name.partition("::")[2].partition(".")[0].strip("_") in wanted:
                found |= files
        return found

    def _importing(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if code.co_name != "register" or ours(code.co_filename) != _REGISTRY:
            return
        files: set[str] = set()
        outer = frame.f_back
        while outer is not None:
            files.update(filter(None, [ours(outer.f_code.co_filename)]))
            if outer.f_code.co_name == "<module>":
                break
            outer = outer.f_back
        for name in frame.f_locals["names"]:
            self.origins[name] = files - {_REGISTRY}

    def _noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            self.ran.add(name)
            return function(*args, **kwargs)

        return noting
