"""torch's own `parallelize_module` on meshes of type `"xla"`, in a script of the drop-in.

torch's styles make DTensors of the inputs, in a process per device. On a mesh of type `"xla"` (or
of isoshard) the styles of `isoshard.torch_bridge.distributed.tensor.parallel` are applied instead;
other meshes are left to torch. The function is replaced when its module is imported.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.common.after_import import after_import

_PACKAGE = "torch.distributed.tensor.parallel"


def install() -> None:
    """Let torch's `parallelize_module` take meshes of one process that drives all devices."""
    after_import(_PACKAGE, _replace)


def _replace() -> None:
    package: Any = sys.modules[_PACKAGE]
    api: Any = sys.modules[f"{_PACKAGE}.api"]
    package.parallelize_module = api.parallelize_module = _by_mesh(api.parallelize_module)


def _by_mesh(original: Any) -> Any:
    """isoshard's function for its meshes, torch's for others."""
    if hasattr(original, "__wrapped__"):
        return original

    @functools.wraps(original)
    def parallelize_module(module: Any, device_mesh: Any = None, *args: Any, **kwargs: Any) -> Any:
        if getattr(device_mesh, "device_type", None) not in naming.OURS:
            return original(module, device_mesh, *args, **kwargs)
        from .tensor.parallel import parallelize_module as ours

        return ours(module, device_mesh, *args, **kwargs)

    return parallelize_module
