"""The SPMD API, by torch_xla's names."""

if __name__ != "isoshard.torch_xla_bridge.torch_xla.distributed.spmd":
    raise ImportError(
        f"import isoshard.torch_xla_bridge.torch_xla.distributed.spmd, not {__name__}"
    )

from isoshard.torch_bridge.kit import (
    HybridMesh,
    MarkShardingFunction,
    Mesh,
    ShardingSpec,
    ShardingType,
    XLAPatchedLinear,
    XLAShard,
    XLAShardedTensor,
    annotate_custom_sharding,
    apply_backward_optimization_barrier,
    auto_policy,
    clear_sharding,
    disable_manual_sharding,
    enable_manual_sharding,
    get_1d_mesh,
    get_global_mesh,
    mark_sharding,
    mark_sharding_with_gradients,
    set_global_mesh,
    shard_as,
    wrap_if_sharded,
    xla_distribute_module,
    xla_distribute_tensor,
    xla_patched_nn_linear_forward,
)
from isoshard.torch_bridge.kit import mark_manual_sharding as _mark_manual_sharding
from isoshard.torch_xla_bridge.session.lazy_submodules import submodules

__all__ = [
    "HybridMesh",
    "MarkShardingFunction",
    "Mesh",
    "ShardingSpec",
    "ShardingType",
    "XLAPatchedLinear",
    "XLAShard",
    "XLAShardedTensor",
    "_mark_manual_sharding",
    "annotate_custom_sharding",
    "apply_backward_optimization_barrier",
    "auto_policy",
    "clear_sharding",
    "disable_manual_sharding",
    "enable_manual_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "set_global_mesh",
    "shard_as",
    "wrap_if_sharded",
    "xla_distribute_module",
    "xla_distribute_tensor",
    "xla_patched_nn_linear_forward",
]

__getattr__ = submodules(__name__, ("api", "debugging", "xla_sharded_tensor", "xla_sharding"))
