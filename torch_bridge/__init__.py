"""PyTorch on JAX meshes: the `jax` device, XLAShardedTensor and the SPMD API.

`import isoshard.torch_bridge as xs` registers the `jax` device with torch. A torch before 2.10
cannot have it: there only `isoshard.torch_bridge.torch_xla_backend` works, and other names say so.

>>> import torch, isoshard as iso
>>> weight = iso.shard(torch.ones(8, 4), iso.make_mesh((8,), ("x",)), ("x",))
>>> (weight + 1).sum().item(), weight.partition_spec
(64.0, P('x',))
"""

if __name__ != "isoshard.torch_bridge":
    raise ImportError(f"import isoshard.torch_bridge, not {__name__}")

from typing import TYPE_CHECKING, Any

from .common import old_torch as _old_torch

__all__ = [
    "ActivationConstraints",
    "CaptureError",
    "CompiledStep",
    "Generator",
    "HybridMesh",
    "JaxFunction",
    "Mesh",
    "ScanLayers",
    "ShardingSpec",
    "ShardingType",
    "StackedLayers",
    "StepReport",
    "TorchFunction",
    "TorchModule",
    "XLAShard",
    "XLAShardedTensor",
    "auto_plan",
    "clear_sharding",
    "compile",
    "constrain_activations",
    "disable_manual_sharding",
    "enable_manual_sharding",
    "excess_precision",
    "get_1d_mesh",
    "get_global_mesh",
    "get_xla_supported_devices",
    "jax_function",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "memory_analysis",
    "print",
    "profile",
    "program_text",
    "register_function_handler",
    "register_lowering",
    "report",
    "scan_layers",
    "set_global_mesh",
    "shard_as",
    "sync",
    "torch_function",
    "torch_module",
    "xla_device",
    "xla_distribute_module",
    "xla_distribute_tensor",
]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)


if TYPE_CHECKING or _old_torch.has_device():
    from isoshard.core.errors import CaptureError
    from isoshard.torch_bridge.engine.capture.step import CompiledStep
    from isoshard.torch_bridge.engine.operators import host_ops as _special  # noqa: F401  (crossings, likewise)
    from isoshard.torch_bridge.engine.operators import multi_writes as _updates  # noqa: F401  (several at once)
    from isoshard.torch_bridge.engine.operators import packed_sequences as _packed  # noqa: F401  (sequences)
    from isoshard.torch_bridge.engine.operators import view_operators as _aliases  # noqa: F401  (views, in dispatch)
    from isoshard.torch_bridge.engine.recording import forking as _forking  # noqa: F401  (raises in children)
    from isoshard.torch_bridge.engine.recording.compile_settings import excess_precision
    from isoshard.torch_bridge.engine.subprograms import factorisation_checks as _failures  # noqa: F401  (of factorisations)
    from isoshard.torch_bridge.engine.subprograms import off_cpu as _elsewhere  # noqa: F401  (for LAPACK)
    from isoshard.torch_bridge.lowerings.registry import register_lowering
    from isoshard.torch_bridge.spmd.on_request import auto_plan

    from . import generation as _generation
    from . import registration as _registration  # noqa: F401  (isoshard.shard and the other verbs)
    from . import trainers as _trainers
    from .device import device as _device
    from .device import paged_cache_memory as _paged_cache_memory
    from .device.generator import Generator
    from .device.hardware import get_xla_supported_devices, xla_device
    from .distributed import local_checks as _local_checks  # noqa: F401  (methods of tensors)
    from .distributed import local_view_hints as _local_view_hints  # noqa: F401  (hints of errors)
    from .distributed import torch_hook as _torch_hook
    from .execution.printing import print
    from .execution.profiling import StepReport, profile, report
    from .execution.runtime import compile, memory_analysis, program_text, sync
    from .handlers.handler_registry import register_function_handler
    from .interop.calling_jax import TorchFunction, torch_function
    from .interop.flax_module import TorchModule, torch_module
    from .interop.torch_to_jax import JaxFunction, jax_function
    from .layout.marks import ShardingType
    from .layout.shard_snapshots import XLAShard
    from .loops import control_flow as _control_flow
    from .loops.scan import ScanLayers, StackedLayers, scan_layers
    from .spmd import (
        HybridMesh,
        Mesh,
        ShardingSpec,
        clear_sharding,
        disable_manual_sharding,
        enable_manual_sharding,
        get_1d_mesh,
        get_global_mesh,
        mark_sharding,
        mark_sharding_with_gradients,
        set_global_mesh,
        shard_as,
        xla_distribute_module,
        xla_distribute_tensor,
    )
    from .spmd.activations import ActivationConstraints, constrain_activations
    from .tensors.tensor import XLAShardedTensor

    _device.register()
    _control_flow.register()
    _trainers.register()
    _generation.register()
    _paged_cache_memory.register()
    _torch_hook.install()
else:
    _old_torch.register_refusals()

    def __getattr__(name: str) -> Any:
        """Say what a name of the bridge needs."""
        if name in __all__:
            _old_torch.refuse(f"isoshard.torch_bridge.{name}")
        raise AttributeError(f"module 'isoshard.torch_bridge' has no attribute {name!r}")
