"""The functions of torch_xla's C extension that scripts and tests call.

There is no extension here: this module has the few names that are in use, in Python.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from isoshard.torch_bridge import naming, runtime
from isoshard.torch_bridge.export import lowered
from isoshard.torch_bridge.session import hardware
from isoshard.torch_bridge.spmd import strings

from .core import xla_model as _xla_model
from .debug import metrics as _metrics
from .torch_xla import real_devices as _real_devices


def _get_xla_sharding_spec(tensor: torch.Tensor) -> str:
    """The layout of a tensor as an OpSharding string; empty if it has none."""
    return strings.sharding_spec_of(tensor)


def _get_xla_sharding_specs(tensors: Sequence[torch.Tensor]) -> list[str]:
    """The layout of each tensor."""
    return [strings.sharding_spec_of(tensor) for tensor in tensors]


def _get_xla_sharding_type(tensor: torch.Tensor) -> int | None:
    """How a tensor is divided, as a number of `ShardingType`; None if it has no layout."""
    return strings.sharding_type_of(tensor)


def _get_xla_sharding_types(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """How each tensor is divided."""
    return [strings.sharding_type_of(tensor) for tensor in tensors]


def _get_xla_tensors_text(tensors: Sequence[torch.Tensor]) -> str:
    """The recorded operations that tensors depend on."""
    return lowered.tape_text(tensors)


def _get_xla_tensors_hlo(tensors: Sequence[torch.Tensor]) -> str:
    """The HLO that would compute tensors, before any optimisation."""
    return lowered.hlo(tensors)


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


def _xla_get_devices() -> list[str]:
    """The logical devices: a list of one."""
    return hardware.get_xla_supported_devices()


def _xla_real_devices() -> list[str]:
    """The chips of this process."""
    return _real_devices()


def _xla_get_all_runtime_devices() -> list[str]:
    """The chips of the job."""
    return hardware.chip_names()


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


def _xla_wait_device_ops(devices: Sequence[str] = ()) -> None:
    """Wait until the devices have finished."""
    _xla_model.wait_device_ops()


def _xla_get_rng_seed(device: str = "") -> int:
    """Where the random numbers stand."""
    return _xla_model.get_rng_state()


def _xla_set_rng_seed(seed: int, device: str = "") -> None:
    """Seed the random numbers."""
    _xla_model.set_rng_state(seed)


def _xla_counter_names() -> list[str]:
    """The names of the counters that are not zero."""
    return _metrics.counter_names()


def _xla_counter_value(name: str) -> int | None:
    """A counter, or None."""
    return _metrics.counter_value(name)


def _xla_metrics_report() -> str:
    """Every metric and counter, as text."""
    return _metrics.metrics_report()
