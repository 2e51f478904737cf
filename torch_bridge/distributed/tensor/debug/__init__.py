"""torch.distributed.tensor.debug's names, for tensors on the `jax` device."""

if __name__ != "isoshard.torch_bridge.distributed.tensor.debug":
    raise ImportError(f"import isoshard.torch_bridge.distributed.tensor.debug, not {__name__}")

from .comm_mode import CommDebugMode
from .picture import visualize_sharding

__all__ = ["CommDebugMode", "visualize_sharding"]
