"""The JAX world: Flax modules laid out by a `Plan`, and models created sharded.

>>> import jax.numpy as jnp
>>> from isoshard.core.mesh import make_mesh
>>> from isoshard.core.plan import Plan
>>> mesh = make_mesh((2, 4), ("data", "model"))
>>> plan = Plan({"*.kernel": (None, "model")})
>>> params = create_sharded(lambda: {"up": {"kernel": jnp.ones((16, 64))}}, mesh, plan)
>>> params["up"]["kernel"].sharding.spec
P(None, 'model')

With this package loaded, `isoshard.shard(module, mesh, plan)` takes Flax NNX modules. Pytrees, Flax
Linen variables among them, are served by the core alone. Flax is imported on first use.
"""

if not __name__.startswith("isoshard."):
    raise ImportError(
        f"this folder is the package isoshard.jax_bridge, imported here as {__name__!r}, which "
        "would make every class twice; install the project (pip install -e .) and import isoshard"
    )

import importlib
import sys

from isoshard.core.frameworks import on_first

from .create import create_sharded

__all__ = ["create_sharded"]

if "flax" in sys.modules:
    importlib.import_module("isoshard.jax_bridge.modules")
else:
    on_first("flax", lambda: importlib.import_module("isoshard.jax_bridge.modules"))
