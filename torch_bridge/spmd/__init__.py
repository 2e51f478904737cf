"""The SPMD API: meshes, and tensors marked with their sharding."""

if __name__ != "isoshard.torch_bridge.spmd":
    raise ImportError(f"import isoshard.torch_bridge.spmd, not {__name__}")

from .auto import auto_policy
from .distribute import (
    convert_to_xla_mesh,
    convert_to_xla_partition_spec,
    xla_distribute_module,
    xla_distribute_tensor,
)
from .gradients import MarkShardingFunction, mark_sharding_with_gradients
from .hybrid import HybridMesh
from .linear import (
    EinsumLinear,
    XLAPatchedLinear,
    apply_xla_patch_to_nn_linear,
    xla_patched_nn_linear_forward,
)
from .manual import disable_manual_sharding, enable_manual_sharding
from .marking import annotate_custom_sharding, clear_sharding, mark_sharding
from .mesh import Mesh, get_1d_mesh, get_global_mesh, set_global_mesh
from .op_sharding import OpSharding
from .optimization_barrier import apply_backward_optimization_barrier, optimization_barrier_
from .same_sharding import shard_as
from .specs import ShardingSpec
from .uneven import UnevenWarning
from .wrapping import unwrap_sharded_tensor, wrap_as_sharded_tensor, wrap_if_sharded

__all__ = [
    "EinsumLinear",
    "HybridMesh",
    "MarkShardingFunction",
    "Mesh",
    "OpSharding",
    "ShardingSpec",
    "UnevenWarning",
    "XLAPatchedLinear",
    "annotate_custom_sharding",
    "apply_backward_optimization_barrier",
    "apply_xla_patch_to_nn_linear",
    "auto_policy",
    "clear_sharding",
    "convert_to_xla_mesh",
    "convert_to_xla_partition_spec",
    "disable_manual_sharding",
    "enable_manual_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "optimization_barrier_",
    "set_global_mesh",
    "shard_as",
    "unwrap_sharded_tensor",
    "wrap_as_sharded_tensor",
    "wrap_if_sharded",
    "xla_distribute_module",
    "xla_distribute_tensor",
    "xla_patched_nn_linear_forward",
]
