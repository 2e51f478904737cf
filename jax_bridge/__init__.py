"""Flax and Equinox models sharded by a `Plan`: created sharded, constrained inside, and trained.

>>> import jax.numpy as jnp
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.plan import Plan
>>> mesh = make_mesh((2, 4), ("data", "model"))
>>> plan = Plan({"*.kernel": (None, "model")})
>>> params = create_sharded(lambda: {"up": {"kernel": jnp.ones((16, 64))}}, mesh, plan)
>>> params["up"]["kernel"].sharding.spec
P(None, 'model')

With this package loaded, `isoshard.shard(module, mesh, plan)` takes Flax NNX and Equinox modules.
Pytrees, Flax Linen variables among them, need only core. `train_step` makes a step that keeps a
model's sharding, `constrain_activations` constrains values inside it, and `linen_model` lists those
values for a plan. Flax and Equinox are imported on first use.
"""

if not __name__.startswith("isoshard."):
    raise ImportError(
        f"this folder is the package isoshard.jax_bridge, imported here as {__name__!r}, which "
        "would make every class twice; install the project (pip install -e .) and import isoshard"
    )

import importlib
import sys

from isoshard.core.frameworks import on_first

from .activations import Constrained, constrain_activations
from .create import create_sharded
from .linen_models import LinenModel, linen_model
from .optimizers import create_opt_state, create_optimizer
from .training import TrainState, TrainStep, train_step

__all__ = [
    "Constrained",
    "LinenModel",
    "TrainState",
    "TrainStep",
    "constrain_activations",
    "create_opt_state",
    "create_optimizer",
    "create_sharded",
    "linen_model",
    "train_step",
]

_ADAPTERS = {
    "flax": "isoshard.jax_bridge.modules",
    "equinox": "isoshard.jax_bridge.equinox_modules",
}

for _root, _module in _ADAPTERS.items():
    if _root in sys.modules:
        importlib.import_module(_module)
    else:
        on_first(_root, lambda module=_module: importlib.import_module(module))


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
