"""`import torch_xla` without torch_xla: its modules, by isoshard.

After `install()`, `import torch_xla.core.xla_model as xm` gives the module
`isoshard.torch_bridge.torch_xla.core.xla_model`, and `"xla"` names the `jax` device. Scripts run
unchanged; `isoshard run-torch-xla script.py` calls this and then the script.

    import isoshard.torch_xla_bridge.drop_in
    isoshard.torch_xla_bridge.drop_in.install()
    import torch_xla                            # isoshard's

It holds for the whole process. docs/torch_xla.md lists every name: offered, different, refused.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from isoshard.core.kit import simulate_devices
from isoshard.torch_bridge.kit import autocast, parallel_hook

from . import xla_alias
from .export import saved_graphs

_OURS = "isoshard.torch_bridge."


def install() -> None:
    """Let `torch_xla` and the device `"xla"` mean isoshard, in this process from now on.

    On the CPU it also makes the virtual devices that `CPU_NUM_DEVICES` asks for, as torch_xla does.
    A second call does nothing.

    Raises:
        RuntimeError: the real torch_xla is loaded already.
        ValueError: `CPU_NUM_DEVICES` is no positive number, or `XLA_SAVE_TENSORS_FMT` no format.
        DeviceError: `CPU_NUM_DEVICES` asks for more devices than JAX has started with.

    Example:
        >>> import subprocess, sys              # it holds for a whole process: here, a second one
        >>> script = "from isoshard.torch_bridge import drop_in; drop_in.install()"
        >>> script += "; import torch_xla; print(torch_xla.__name__)"
        >>> subprocess.check_output([sys.executable, "-c", script], text=True).strip()
        'isoshard.torch_xla_bridge.torch_xla'
    """
    loaded = sys.modules.get("torch_xla")
    if loaded is not None and not loaded.__name__.startswith(_OURS):
        raise RuntimeError(
            f"the real torch_xla is loaded already, from {loaded.__file__}; isoshard can take its "
            "place only in a process that has not imported it. Call drop_in.install() first, or "
            "drive the real one with isoshard.torch_xla_bridge.torch_xla_backend."
        )
    if not any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        _simulate_devices()
        sys.meta_path.insert(0, _AliasFinder())
        saved_graphs.begin()
    xla_alias.register()
    autocast.register_xla()
    parallel_hook.install()


def _simulate_devices() -> None:
    requested = os.environ.get("CPU_NUM_DEVICES")
    if requested is None or os.environ.get("PJRT_DEVICE", "CPU") != "CPU":
        return
    if not requested.isdecimal() or int(requested) < 1:
        raise ValueError(
            f"CPU_NUM_DEVICES is a positive number of devices, and it is {requested!r}"
        )
    simulate_devices(int(requested))


class _AliasFinder(importlib.abc.MetaPathFinder):
    """Finds `torch_xla.*` as the module of the same name in isoshard."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of one module; None if it is none of torch_xla's."""
        if fullname.partition(".")[0] != "torch_xla":
            return None
        real = importlib.util.find_spec(_OURS + fullname)
        if real is None:
            raise ModuleNotFoundError(
                f"isoshard has no module {fullname!r} in the place of torch_xla; docs/torch_xla.md "
                "lists the modules it has, and what to use instead of the others",
                name=fullname,
            )
        package = real.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(
            fullname, _AliasLoader(), origin=real.origin, is_package=package
        )


class _AliasLoader(importlib.abc.Loader):
    """Gives the very module of isoshard, so that each class exists once."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Import it under its own name."""
        module = importlib.import_module(_OURS + spec.name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It was executed when it was imported; what the import system wrote over it goes back."""
        spec = module.__spec__
        if spec is not None and isinstance(spec.loader, _AliasLoader):
            module.__spec__ = spec.loader_state
