"""The functions of torch_xla's C extension that scripts and tests call.

There is no extension here: this module has the few names that are in use, in Python. Most are
functions of other modules, whose arguments are given by position, as an extension's are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax as _jax
import torch

from isoshard.core.kit import DistributedError as _DistributedError
from isoshard.torch_bridge.kit import (
    OpSharding,
    from_shards,
    hardware,
    marking,
    modes,
    naming,
    reported_shardings,
    runtime,
    shard_shapes,
)
from isoshard.torch_bridge.kit import TorchFunction as _TorchFunction
from isoshard.torch_bridge.kit import address_of as _address_of
from isoshard.torch_bridge.kit import preemption as _preemption
from isoshard.torch_xla_bridge.export import described, lowered
from isoshard.torch_xla_bridge.export import lowering_context as lowering  # noqa: F401

from .core import xla_model as _xla_model
from .debug import metrics as _metrics
from .torch_xla import real_devices as _real_devices

_get_xla_sharding_spec = reported_shardings.buffers_spec_of
_get_xla_sharding_type = reported_shardings.buffers_type_of
_xla_clear_sharding = marking.clear_sharding
_global_tensor_from_cpu_shards = from_shards.tensor_from_shards
_spmd_full_to_shard_shape = shard_shapes.full_to_shard_shape
_spmd_shard_to_full_shape = shard_shapes.shard_to_full_shape
_get_xla_tensor_debug_info = described.debug_info
_get_graph_hash = described.graph_hash
_xla_get_tensor_id = _address_of
_get_xla_tensors_text = lowered.tape_text
_get_xla_tensors_hlo = lowered.hlo
_xla_get_devices = hardware.get_xla_supported_devices
_xla_real_devices = _real_devices
_xla_get_all_runtime_devices = hardware.chip_names
_xla_wait_device_ops = _xla_model.wait_device_ops
_xla_counter_names = _metrics.counter_names
_xla_counter_value = _metrics.counter_value
_xla_metrics_report = _metrics.metrics_report
_xla_get_auto_sharding = modes.auto_spmd
_activate_preemption_sync_manager = _preemption.activate
_deactivate_preemption_sync_manager = _preemption.deactivate
_sync_point_reached = _preemption.sync_point_reached


def _get_xla_sharding_specs(tensors: Sequence[torch.Tensor]) -> list[str]:
    """The layout of each tensor."""
    return [reported_shardings.buffers_spec_of(tensor) for tensor in tensors]


def _get_xla_sharding_types(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """How each tensor is divided."""
    return [reported_shardings.buffers_type_of(tensor) for tensor in tensors]


def _xla_mark_sharding(tensor: torch.Tensor, sharding: OpSharding) -> None:
    """Mark a tensor with a layout that has no mesh."""
    mesh, spec = from_shards.mesh_and_spec(sharding, tensor.dim())
    marking.mark_sharding(tensor, mesh, spec)


def _xla_annotate_custom_sharding(tensor: torch.Tensor, sharding: OpSharding) -> None:
    """Lay a tensor out from here on, whatever mark it has."""
    mesh, spec = from_shards.mesh_and_spec(sharding, tensor.dim())
    marking.annotate_custom_sharding(tensor, mesh, spec)


def _get_xla_tensor_dimension_size(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The size of one axis, as an int32 tensor; shapes are static, so it is the true one."""
    return torch.tensor(tensor.shape[dim], dtype=torch.int32, device=tensor.device)


def _xla_tensors_from_aten(
    tensors: Sequence[torch.Tensor], devices: Sequence[str], shardings: Any = None
) -> list[torch.Tensor]:
    """CPU tensors on the device, marked where a layout is given."""
    tensors_out = [tensor.to(device) for tensor, device in zip(tensors, devices, strict=True)]
    for tensor, sharding in zip(tensors_out, shardings or (), strict=bool(shardings)):
        if sharding is not None:
            _xla_mark_sharding(tensor, sharding.sharding)
    return tensors_out


def _xla_user_computation(
    name: str, tensors: Sequence[torch.Tensor], computation: Any
) -> list[torch.Tensor]:
    """The results of a computation of `torch_xla.core.xla_builder` on tensors."""
    results = _TorchFunction(computation, name, wide=True)(*tensors)
    return list(results) if isinstance(results, tuple) else [results]


def _get_stablehlo(
    tensors: Sequence[torch.Tensor],
    device: str,
    devices: Sequence[str],
    emit_bytecode: bool,
) -> bytes:
    """The StableHLO that would compute tensors, as text or bytecode."""
    return lowered.bytecode(tensors) if emit_bytecode else lowered.stablehlo(tensors).encode()


def _xla_get_default_device() -> str:
    """The logical device."""
    return str(naming.current())


def _xla_set_default_device(device: str) -> str:
    """The logical device: there is one."""
    return _xla_get_default_device()


def _xla_sync_multi(
    tensors: Sequence[torch.Tensor],
    devices: Sequence[str] = (),
    wait: bool = True,
    sync_xla_data: bool = True,
) -> None:
    """Execute what tensors need, and wait for it."""
    _xla_model.unlazy(tensors)


def _xla_step_marker(
    device: str, devices: Sequence[str] = (), wait: bool = False, reset_scope: bool = True
) -> None:
    """Execute what was recorded."""
    runtime.sync(wait=wait)


def _xla_get_rng_seed(device: str = "") -> int:
    """The state of the random numbers."""
    return _xla_model.get_rng_state()


def _xla_set_rng_seed(seed: int, device: str = "") -> None:
    """Seed the random numbers."""
    _xla_model.set_rng_state(seed)


def _xla_num_runtime_devices() -> int:
    """How many chips the job has."""
    return len(hardware.chip_names())


def _init_computation_client() -> None:
    """No effect: JAX starts its devices at first use."""


def _ensure_xla_coordinator_initialized(
    global_rank: int, world_size: int, master_addr: str, port: str = ""
) -> None:
    """No effect, where JAX already has all processes of the job."""
    if world_size > _jax.process_count():
        raise _DistributedError(
            f"process {global_rank} is one of {world_size}, and JAX has "
            f"{_jax.process_count()}; call isoshard.distributed.init_distributed() before any "
            "tensor is created"
        )


def _xla_set_enable_alias_with_buffer_donor_config(should_alias: bool) -> None:
    """No effect: memory without other references is always reused for results."""


def _xla_get_enable_alias_with_buffer_donor_config() -> bool:
    """True: memory without other references is reused for results."""
    return True
