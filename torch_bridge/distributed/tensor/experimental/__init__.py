"""torch.distributed.tensor.experimental's names, for tensors on the `jax` device."""

if __name__ != "isoshard.torch_bridge.distributed.tensor.experimental":
    raise ImportError(
        f"import isoshard.torch_bridge.distributed.tensor.experimental, not {__name__}"
    )

from .context import context_parallel, implicit_replication
from .func_map import local_map
from .sharding_rules import register_sharding, unregister_sharding

__all__ = [
    "context_parallel",
    "implicit_replication",
    "local_map",
    "register_sharding",
    "unregister_sharding",
]
