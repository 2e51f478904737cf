"""PyTorch on JAX meshes: the `jax` device, XLAShardedTensor and the SPMD API.

`import isoshard.torch_bridge as xs` registers the `jax` device with torch.
"""

if __name__ != "isoshard.torch_bridge":
    raise ImportError(f"import isoshard.torch_bridge, not {__name__}")

from isoshard.torch_bridge.engine import aliases as _aliases  # noqa: F401  (views, by dispatcher)
from isoshard.torch_bridge.engine import failures as _failures  # noqa: F401  (of factorisations)
from isoshard.torch_bridge.engine import packed as _packed  # noqa: F401  (sequences)
from isoshard.torch_bridge.engine import special as _special  # noqa: F401  (crossings, likewise)
from isoshard.torch_bridge.engine import updates as _updates  # noqa: F401  (several at once)
from isoshard.torch_bridge.engine.capture.step import CompiledStep
from isoshard.torch_bridge.engine.capture.symbolic import CaptureError
from isoshard.torch_bridge.lowerings.registry import register_lowering

from . import device as _device
from . import framework as _framework  # noqa: F401  (isoshard.shard and the other verbs)
from .function import JaxFunction, jax_function
from .generator import Generator
from .runtime import compile, memory_analysis, program_text, sync
from .scan import ScanLayers, StackedLayers, scan_layers
from .spmd import Mesh, ShardingSpec, clear_sharding, mark_sharding
from .tensor import ShardingType, XLAShard, XLAShardedTensor
from .xla_model import get_xla_supported_devices, xla_device

__all__ = [
    "CaptureError",
    "CompiledStep",
    "Generator",
    "JaxFunction",
    "Mesh",
    "ScanLayers",
    "ShardingSpec",
    "ShardingType",
    "StackedLayers",
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
    "scan_layers",
    "sync",
    "xla_device",
]

_device.register()
