"""The core of isoshard: mesh, spec, tiles, placement, exchange, plan, pictures and counters.

It imports JAX and NumPy (and rich to draw). Bridges to frameworks import it, never the reverse.
`__all__` is what `isoshard` offers of it; some further verbs are for those who write bridges.
"""

if not __name__.startswith("isoshard."):
    raise ImportError(
        f"this folder is the package isoshard.core, not {__name__!r}: under two names every class "
        "would exist twice. Install the project (pip install -e .) and import isoshard."
    )

from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .errors import (
    CheckpointError,
    ClusterWarning,
    CopyError,
    DeviceError,
    DistributedError,
    RecompilationWarning,
    ReplicationWarning,
    ShardingError,
    SpecError,
    UnevenError,
    UnrepresentableError,
)
from .layout.axis_types import typeof
from .layout.mesh import as_mesh as as_mesh
from .layout.mesh import hybrid_mesh, make_mesh
from .layout.mesh_slices import slice_axes
from .layout.op_sharding import parse_op_sharding, to_op_sharding
from .layout.shards import Shard, local_shards
from .layout.spec import named_sharding as named_sharding
from .layout.spec import normalize_spec
from .layout.spec import register_spelling as register_spelling
from .layout.spec import same_layout as same_layout
from .layout.tiles import Tiles
from .layout.uneven import UnevenArray
from .layout.virtual_devices import simulate_devices
from .pictures.visualize import visualize
from .plan import (
    Activation,
    Conv,
    Experts,
    Heads,
    Largest,
    Linear,
    Plan,
    PlanError,
    UnusedRuleWarning,
)
from .processes import Processes, Termination, init_distributed
from .runtime import metrics as metrics
from .runtime.compilation_cache import compilation_cache
from .transfer.device_put import full, reshard, shard, sharding_of
from .transfer.exchange import to_jax, to_torch
from .transfer.process_local import from_local

__all__ = [
    "Activation",
    "CheckpointError",
    "ClusterWarning",
    "Conv",
    "CopyError",
    "DeviceError",
    "DistributedError",
    "Experts",
    "Heads",
    "Largest",
    "Linear",
    "Mesh",
    "NamedSharding",
    "P",
    "Plan",
    "PlanError",
    "Processes",
    "RecompilationWarning",
    "ReplicationWarning",
    "Shard",
    "ShardingError",
    "SpecError",
    "Termination",
    "Tiles",
    "UnevenArray",
    "UnevenError",
    "UnrepresentableError",
    "UnusedRuleWarning",
    "compilation_cache",
    "from_local",
    "full",
    "hybrid_mesh",
    "init_distributed",
    "local_shards",
    "make_mesh",
    "normalize_spec",
    "parse_op_sharding",
    "reshard",
    "shard",
    "sharding_of",
    "simulate_devices",
    "slice_axes",
    "to_jax",
    "to_op_sharding",
    "to_torch",
    "typeof",
    "visualize",
]
