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
from . import _annexes
from . import _renamed
from . import core
from . import metrics
from .core import *  # noqa: F403 (the one list is that of core)
from .core import frameworks
from .core.plan import automatic
from .core.transfer import unequal_blocks
from typing import Any
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import data
    from . import domain
    from . import jax_bridge
    from . import onnx_bridge as onnx
    from . import planner
    from . import torch_bridge
    from . import weights
    from .core.checkpoint import check_storage
    from .core.checkpoint import latest
    from .core.checkpoint import restore
    from .core.checkpoint import save
    from .core.weights import load_safetensors
    from .core.weights import save_safetensors
    from .jax_bridge import create_sharded
    from .torch_bridge import jax_function
    from .torch_bridge import torch_function
    from .torch_bridge import torch_module
    from .torch_bridge.dtensor.array_loading import load_arrays
    from .torch_bridge.dtensor.dtensor_exchange import to_dtensor


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
    """Load a bridge, or another part, when it or something that needs it is first named."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _LAZY:
        found = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
        return found
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
