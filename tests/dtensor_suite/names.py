"""What a name of torch.distributed is on one process: isoshard's, else torch's own, else absent.

A test file is read with its imports renamed (`renaming`), and every renamed import asks here:

>>> named("torch.distributed._tensor.placement_types", "Shard").__module__
'torch.distributed.tensor.placement_types'
>>> named("torch.distributed._tensor.api", "distribute_tensor").__module__
'isoshard.torch_bridge.distributed.tensor.distributing'

What neither has any more is a stand-in that says so when a test uses it, so that the other tests of
its file run.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from types import ModuleType
from typing import Any

from . import common, rank_zero

OURS = "isoshard.torch_bridge.distributed"
COMMON = "torch.testing._internal.distributed._tensor.common_dtensor"
RENAMED = tuple(
    f"torch.{name}"
    for name in (
        "distributed",
        "testing._internal.distributed",
        "testing._internal.common_distributed",
    )
)
"""Imports from modules whose names begin so are renamed."""

_MOVED = ("_dtensor_spec", "_utils", "placement_types", "_api", "_op_schema")
"""Modules of `torch.distributed.tensor` in which torch 2.6's private names may be today."""
_GPUS = ("skip_if_lt_x_gpu", "requires_nccl")


class NotHereError(Exception):
    """A test uses a private name of torch that neither isoshard nor today's torch has."""


class Absent:
    """Stands for such a name until it is used."""

    def __init__(self, name: str):
        """`name`: in full."""
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Say that it is not there."""
        raise NotHereError(self._name)

    def __getattr__(self, name: str) -> Any:
        """Say that it is not there; Python's own questions are answered."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotHereError(f"{self._name}.{name}")


def is_renamed(module: str) -> bool:
    """Whether imports from a module are renamed."""
    return module.startswith(RENAMED)


def named(module: str, name: str) -> Any:
    """What `from module import name` gives."""
    if module == COMMON:
        return getattr(common, name, None) or Absent(f"{module}.{name}")
    if name in _GPUS:
        return common.with_any_devices
    if module == "torch.distributed" and name in vars(type(rank_zero.GROUP)):
        return getattr(rank_zero.GROUP, name)
    homes = [*_ours(module), *_theirs(module)]
    for home in homes:
        if hasattr(home, name):
            return getattr(home, name)
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"{home.__name__}.{name}")
    return Absent(f"{module}.{name}")


def module_named(module: str) -> Any:
    """What `import module as x` gives."""
    if module == "torch.distributed":
        return rank_zero.GROUP
    found = _imported(_in_ours(module)) or _imported(module)
    return found if found is not None else Absent(module)


def _in_ours(module: str) -> str:
    tail = module.removeprefix("torch.distributed").replace("._tensor", ".tensor", 1)
    return f"{OURS}{tail}" if module.startswith("torch.distributed") else ""


def _ours(module: str) -> list[ModuleType]:
    """The module of isoshard and those above it, down to torch.distributed's."""
    found, name = [], _in_ours(module)
    while name.startswith(OURS):
        if (here := _imported(name)) is not None:
            found.append(here)
        name = name.rpartition(".")[0]
    return found


def _theirs(module: str) -> list[ModuleType]:
    tensor = "torch.distributed.tensor"
    names = [module, module.replace("torch.distributed._tensor", tensor)]
    if "._tensor" in module or ".tensor" in module:
        names += [f"{tensor}.{moved}" for moved in _MOVED]
    return [here for name in names if (here := _imported(name)) is not None]


def _imported(name: str) -> ModuleType | None:
    if not name:
        return None
    try:
        return importlib.import_module(name)
    except ImportError:
        return sys.modules.get(name)
