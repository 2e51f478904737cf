"""torch's own `distribute_tensor` and `distribute_module` on meshes of isoshard.

For a mesh of device type `"xla"` both import a function from `torch_xla.distributed.spmd` and call
it. `install` answers that import, and no other, with isoshard's functions; where the real torch_xla
is installed, or `drop_in` has replaced it, theirs is found first. No module named `torch_xla`
remains in `sys.modules`. Of torch's own meshes those of type `"xla"` need no process group.

>>> import sys, torch, isoshard.torch_bridge as xs
>>> from torch.distributed.tensor import Shard, distribute_tensor
>>> mesh = xs.Mesh(range(8), (8,), ("x",))
>>> distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)]).placements
(Shard(dim=0),)
>>> "torch_xla" in sys.modules
False
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from isoshard.torch_bridge._torch_internals.dtensor_fields import ASKING

_MODULES = ("torch_xla", "torch_xla.distributed", "torch_xla.distributed.spmd")
_FUNCTIONS = {
    "xla_distribute_tensor": "distribute_tensor",
    "xla_distribute_module": "distribute_module",
}


def install() -> None:
    """Let torch's functions take meshes of isoshard."""
    if not any(isinstance(finder, _HookFinder) for finder in sys.meta_path):
        sys.meta_path.append(_HookFinder())


class _HookFinder(importlib.abc.MetaPathFinder):
    """Finds `torch_xla.distributed.spmd` when torch's DTensor imports it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of one module; None if it is another, or imported by other code."""
        if fullname not in _MODULES or _asking() != ASKING.path:
            return None
        return importlib.machinery.ModuleSpec(
            fullname, _HookLoader(), is_package=fullname != _MODULES[-1]
        )


class _HookLoader(importlib.abc.Loader):
    """Makes modules that are removed once a function was taken from the last."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """An empty module; the last one gives the functions."""
        module = ModuleType(spec.name)
        if spec.name == _MODULES[-1]:
            module.__dict__["__getattr__"] = _function
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def _function(name: str) -> Any:
    if name not in _FUNCTIONS:
        raise AttributeError(name)
    for module in _MODULES:
        sys.modules.pop(module, None)
    from . import tensor

    return getattr(tensor, _FUNCTIONS[name])


def _asking() -> str | None:
    """The module whose import statement is being executed."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and not name.startswith("importlib"):
            return name
        frame = frame.f_back
    return None
