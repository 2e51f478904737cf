"""Meshes and marks, by torch_xla's names."""

from isoshard.torch_bridge.layout.marks import ShardingType
from isoshard.torch_bridge.layout.shard_snapshots import XLAShard
from isoshard.torch_bridge.spmd.gradients import MarkShardingFunction, mark_sharding_with_gradients
from isoshard.torch_bridge.spmd.hybrid import HybridMesh
from isoshard.torch_bridge.spmd.linear import (
    EinsumLinear,
    XLAPatchedLinear,
    apply_xla_patch_to_nn_linear,
    xla_patched_nn_linear_forward,
)
from isoshard.torch_bridge.spmd.manual import (
    disable_manual_sharding,
    enable_manual_sharding,
)
from isoshard.torch_bridge.spmd.manual import mark_manual_sharding as _mark_manual_sharding
from isoshard.torch_bridge.spmd.marking import (
    annotate_custom_sharding,
    clear_sharding,
    mark_sharding,
)
from isoshard.torch_bridge.spmd.mesh import Mesh, get_1d_mesh, get_global_mesh, set_global_mesh
from isoshard.torch_bridge.spmd.optimization_barrier import apply_backward_optimization_barrier
from isoshard.torch_bridge.spmd.sharding_alike import shard_as
from isoshard.torch_bridge.spmd.specs import ShardingSpec
from isoshard.torch_bridge.spmd.wrapping import (
    unwrap_sharded_tensor,
    wrap_as_sharded_tensor,
    wrap_if_sharded,
)
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

PartitionSpec = tuple[tuple[int | str, ...] | int | str | None, ...]
"""One entry per tensor axis: a mesh axis, several of them, or None."""

__all__ = [
    "EinsumLinear",
    "HybridMesh",
    "MarkShardingFunction",
    "Mesh",
    "PartitionSpec",
    "ShardingSpec",
    "ShardingType",
    "XLAPatchedLinear",
    "XLAShard",
    "XLAShardedTensor",
    "_mark_manual_sharding",
    "annotate_custom_sharding",
    "apply_backward_optimization_barrier",
    "apply_xla_patch_to_nn_linear",
    "clear_sharding",
    "disable_manual_sharding",
    "enable_manual_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "set_global_mesh",
    "shard_as",
    "unwrap_sharded_tensor",
    "wrap_as_sharded_tensor",
    "wrap_if_sharded",
    "xla_patched_nn_linear_forward",
]
