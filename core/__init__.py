"""The core of isoshard: mesh, spec, tiles, placement, exchange, plan, pictures and counters.

It imports JAX and NumPy (and rich to draw). Bridges to frameworks import it, never the reverse.
`__all__` is what `isoshard` has at its top; `isoshard.errors`, `.rules`, `.sharding` and the other
namespaces take the rest from its modules. Some further verbs are for those who write bridges.
"""

if not __name__.startswith("isoshard."):
    raise ImportError(
        f"this folder is the package isoshard.core, not {__name__!r}: under two names every class "
        "would exist twice. Install the project (pip install -e .) and import isoshard."
    )

from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .errors import CheckpointError, RecompilationWarning, ShardingError
from .layout.mesh import as_mesh as as_mesh
from .layout.mesh import hybrid_mesh, make_mesh
from .layout.shards import local_shards
from .layout.spec import named_sharding as named_sharding
from .layout.spec import register_spelling as register_spelling
from .layout.spec import same_layout as same_layout
from .layout.uneven import UnevenArray
from .layout.virtual_devices import simulate_devices
from .pictures.visualize import visualize
from .plan import Plan, PlanError
from .runtime import metrics as metrics
from .runtime.compilation_cache import compilation_cache
from .transfer.device_put import full, reshard, shard, sharding_of
from .transfer.exchange import to_jax, to_torch
from .transfer.process_local import from_local

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
    "compilation_cache",
    "from_local",
    "full",
    "hybrid_mesh",
    "local_shards",
    "make_mesh",
    "reshard",
    "shard",
    "sharding_of",
    "simulate_devices",
    "to_jax",
    "to_torch",
    "visualize",
]
