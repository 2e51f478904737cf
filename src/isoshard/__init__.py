"""isoshard: one sharding spec drives JAX and PyTorch, without copies.

>>> import numpy as np
>>> import isoshard as iso
>>> from isoshard import P
>>> mesh = iso.make_mesh((2, 4), ("x", "y"))
>>> a = iso.shard(np.ones((8, 4), np.float32), mesh, P("x", None))
>>> iso.sharding_of(iso.reshard(a, P(None, "y"))).spec
P(None, 'y')

Importing this loads neither torch nor flax nor onnx, and changes no configuration. The bridges
`isoshard.torch_bridge`, `isoshard.jax_bridge` and `isoshard.onnx` load when they are named, or when
a verb meets the first object of their framework; `data`, `domain`, `planner` and `weights` when
they are named.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any

from isoshard import _annexes, _renamed, core, metrics
from isoshard.core import *  # noqa: F403 (the one list is that of core)
from isoshard.core import frameworks
from isoshard.core.plan import automatic
from isoshard.core.transfer import unequal_blocks

if TYPE_CHECKING:
    from isoshard import data, domain, jax_bridge, planner, torch_bridge, weights
    from isoshard import onnx_bridge as onnx
    from isoshard.core.checkpoint import check_storage, latest, restore, save
    from isoshard.core.weights import load_safetensors, save_safetensors
    from isoshard.jax_bridge import create_sharded
    from isoshard.torch_bridge import jax_function, torch_function, torch_module
    from isoshard.torch_bridge.dtensor.array_loading import load_arrays
    from isoshard.torch_bridge.dtensor.dtensor_exchange import to_dtensor

__all__ = ["create_sharded", "data", "domain", "jax_bridge", "jax_function", "load_arrays"]
__all__ += [
    "metrics",
    "onnx",
    "planner",
    "to_dtensor",
    "torch_bridge",
    "torch_function",
    "torch_module",
]
__all__ += ["check_storage", "latest", "restore", "save"]
__all__ += ["load_safetensors", "save_safetensors", "weights"]
__all__ += core.__all__

_BRIDGES = {
    "torch": "isoshard.torch_bridge",
    "flax": "isoshard.jax_bridge",
    "equinox": "isoshard.jax_bridge",
    "onnx": "isoshard.onnx_bridge",
}
_MODULES = {
    "data": "isoshard.data",
    "domain": "isoshard.domain",
    "jax_bridge": "isoshard.jax_bridge",
    "onnx": "isoshard.onnx_bridge",
    "planner": "isoshard.planner",
    "torch_bridge": "isoshard.torch_bridge",
    "weights": "isoshard.weights",
}
_LAZY = {
    "check_storage": "isoshard.core.checkpoint",
    "create_sharded": "isoshard.jax_bridge",
    "jax_function": "isoshard.torch_bridge",
    "latest": "isoshard.core.checkpoint",
    "load_arrays": "isoshard.torch_bridge.dtensor.array_loading",
    "load_safetensors": "isoshard.core.weights",
    "restore": "isoshard.core.checkpoint",
    "save": "isoshard.core.checkpoint",
    "save_safetensors": "isoshard.core.weights",
    "to_dtensor": "isoshard.torch_bridge.dtensor.dtensor_exchange",
    "torch_function": "isoshard.torch_bridge",
    "torch_module": "isoshard.torch_bridge",
}


def __getattr__(name: str) -> Any:
    """Load a bridge or another lazy module at the first use of its name."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _LAZY:
        value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
        return value
    near = difflib.get_close_matches(name, __all__, 1)
    hint = f"; did you mean isoshard.{near[0]}?" if near else ""
    raise AttributeError(f"module 'isoshard' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    """The public names, those not loaded yet included."""
    return sorted(__all__)


def _install_loaders() -> None:
    blocks = "isoshard.core.blocks.verbs_of_core"
    unequal_blocks.wire(lambda: importlib.import_module(blocks))
    planner = "isoshard.planner.plan_search.searching"
    automatic.register_search(lambda: importlib.import_module(planner).plan_for)
    for root, bridge in _BRIDGES.items():
        frameworks.on_first(root, lambda bridge=bridge: importlib.import_module(bridge))


_annexes.install()
_install_loaders()
_renamed.install()
