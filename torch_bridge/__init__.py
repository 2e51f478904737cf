"""PyTorch on JAX meshes: the `jax` device, XLAShardedTensor and the SPMD API.

`import isoshard.torch_bridge as xs` registers the `jax` device with torch.
"""

if __name__ != "isoshard.torch_bridge":
    raise ImportError(f"import isoshard.torch_bridge, not {__name__}")

from isoshard.torch_bridge import device as _device
from isoshard.torch_bridge import framework as _framework
from isoshard.torch_bridge import lowerings
from isoshard.torch_bridge.engine import aliases, special
from isoshard.torch_bridge.engine.symbolic import CaptureError
from isoshard.torch_bridge.function import JaxFunction, jax_function
from isoshard.torch_bridge.lowerings.registry import register_lowering
from isoshard.torch_bridge.runtime import compile, memory_analysis, program_text, sync
from isoshard.torch_bridge.spmd import Mesh, ShardingSpec, clear_sharding, mark_sharding
from isoshard.torch_bridge.tensor import ShardingType, XLAShard, XLAShardedTensor
from isoshard.torch_bridge.xla_model import get_xla_supported_devices, xla_device

__all__ = [
    "CaptureError",
    "JaxFunction",
    "Mesh",
    "ShardingSpec",
    "ShardingType",
    "XLAShard",
    "XLAShardedTensor",
    "clear_sharding",
    "compile",
    "get_xla_supported_devices",
    "jax_function",
    "mark_sharding",
    "memory_analysis",
    "program_text",
    "register_lowering",
    "sync",
    "xla_device",
]

_device.register()
