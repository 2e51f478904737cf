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
a verb meets the first object of their framework; `checkpoint`, `data`, `domain`, `planner` and
`weights` when they are named. `__all__` is the public list, which docs/api_stability.md explains;
names that have moved to a namespace warn (`core/deprecations.py`).
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any

from isoshard.core import (
    CheckpointError,
    Mesh,
    NamedSharding,
    P,
    Plan,
    PlanError,
    RecompilationWarning,
    ShardingError,
    UnevenArray,
    compilation_cache,
    frameworks,
    from_local,
    full,
    hybrid_mesh,
    local_shards,
    make_mesh,
    reshard,
    shard,
    sharding_of,
    simulate_devices,
    to_jax,
    to_torch,
    visualize,
)
from isoshard.core.deprecations import moved_attribute
from isoshard.core.plan import automatic
from isoshard.core.transfer import unequal_blocks

from . import _annexes, _renamed, distributed, errors, metrics, rules, sharding

if TYPE_CHECKING:
    from isoshard import checkpoint, data, domain, planner, weights
    from isoshard import jax_bridge as jax_bridge
    from isoshard import onnx_bridge as onnx
    from isoshard import torch_bridge as torch_bridge
    from isoshard.core.checkpoint import latest, restore, save
    from isoshard.core.weights import load_safetensors, save_safetensors
    from isoshard.jax_bridge import create_sharded
    from isoshard.torch_bridge import jax_function, torch_function, torch_module
    from isoshard.torch_bridge.dtensor.dtensor_exchange import to_dtensor

__all__ = [
    "CheckpointError",
    "Mesh",
    "NamedSharding",
    "P",
    "Plan",
    "PlanError",
    "RecompilationWarning",
    "ShardingError",
    "UnevenArray",
    "checkpoint",
    "compilation_cache",
    "create_sharded",
    "data",
    "distributed",
    "domain",
    "errors",
    "from_local",
    "full",
    "hybrid_mesh",
    "jax_function",
    "latest",
    "load_safetensors",
    "local_shards",
    "make_mesh",
    "metrics",
    "onnx",
    "planner",
    "reshard",
    "restore",
    "rules",
    "save",
    "save_safetensors",
    "shard",
    "sharding",
    "sharding_of",
    "simulate_devices",
    "to_dtensor",
    "to_jax",
    "to_torch",
    "torch_function",
    "torch_module",
    "visualize",
    "weights",
]

_BRIDGES = {
    "torch": "isoshard.torch_bridge",
    "flax": "isoshard.jax_bridge",
    "equinox": "isoshard.jax_bridge",
    "onnx": "isoshard.onnx_bridge",
}
_MODULES = {
    "checkpoint": "isoshard.checkpoint",
    "data": "isoshard.data",
    "domain": "isoshard.domain",
    "jax_bridge": "isoshard.jax_bridge",
    "onnx": "isoshard.onnx_bridge",
    "planner": "isoshard.planner",
    "torch_bridge": "isoshard.torch_bridge",
    "weights": "isoshard.weights",
}
_LAZY = {
    "create_sharded": "isoshard.jax_bridge",
    "jax_function": "isoshard.torch_bridge",
    "latest": "isoshard.core.checkpoint",
    "load_safetensors": "isoshard.core.weights",
    "restore": "isoshard.core.checkpoint",
    "save": "isoshard.core.checkpoint",
    "save_safetensors": "isoshard.core.weights",
    "to_dtensor": "isoshard.torch_bridge.dtensor.dtensor_exchange",
    "torch_function": "isoshard.torch_bridge",
    "torch_module": "isoshard.torch_bridge",
}
_MOVED = {
    "Activation": "isoshard.rules",
    "ClusterWarning": "isoshard.errors",
    "Conv": "isoshard.rules",
    "CopyError": "isoshard.errors",
    "DeviceError": "isoshard.errors",
    "DistributedError": "isoshard.errors",
    "Experts": "isoshard.rules",
    "Heads": "isoshard.rules",
    "Largest": "isoshard.rules",
    "Linear": "isoshard.rules",
    "Processes": "isoshard.distributed",
    "ReplicationWarning": "isoshard.errors",
    "Shard": "isoshard.sharding",
    "SpecError": "isoshard.errors",
    "Termination": "isoshard.distributed",
    "Tiles": "isoshard.sharding",
    "UnevenError": "isoshard.errors",
    "UnrepresentableError": "isoshard.errors",
    "UnusedRuleWarning": "isoshard.errors",
    "check_storage": "isoshard.checkpoint",
    "init_distributed": "isoshard.distributed",
    "load_arrays": "isoshard.checkpoint",
    "normalize_spec": "isoshard.sharding",
    "parse_op_sharding": "isoshard.sharding",
    "slice_axes": "isoshard.sharding",
    "to_op_sharding": "isoshard.sharding",
    "typeof": "isoshard.sharding",
}
"""Name that was here -> the namespace that has it now."""


def __getattr__(name: str) -> Any:
    """A module or a name that loads on first use, or one that has moved."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _LAZY:
        member = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
        return member
    if name in _MOVED:
        return moved_attribute("isoshard", name, _MOVED[name])
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
