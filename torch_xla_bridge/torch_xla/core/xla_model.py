"""Devices, steps, collectives and files, by torch_xla's names.

    import torch_xla.core.xla_model as xm

A script is one process with one logical device, as in torch_xla's SPMD mode: ordinals are 0, and
collectives between replicas have nobody to talk to; see
`isoshard.torch_xla_bridge.session.replicas` and `isoshard.torch_xla_bridge.session.collectives`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import torch

from isoshard.torch_bridge.kit import (
    XLA_LIB,
    MemoryInfo,
    add_step_closure,
    get_memory_info,
    get_xla_supported_devices,
    hardware,
    lazy_tensor,
    naming,
    optimization_barrier_,
    random_state,
    reading,
    runtime,
    xla_device,
)
from isoshard.torch_xla_bridge.export.lowered import bytecode as get_stablehlo_bytecode
from isoshard.torch_xla_bridge.export.lowered import stablehlo as get_stablehlo
from isoshard.torch_xla_bridge.session.buckets import (
    CoalescingBuckets,
    all_gather_bucketized,
    all_reduce_bucketized_gradients,
    reduce_scatter_bucketized,
)
from isoshard.torch_xla_bridge.session.collectives import (
    REDUCE_AND,
    REDUCE_MAX,
    REDUCE_MIN,
    REDUCE_MUL,
    REDUCE_OR,
    REDUCE_SUM,
    all_gather,
    all_reduce,
    all_to_all,
    collective_broadcast,
    collective_permute,
    recv,
    reduce_scatter,
    send,
)
from isoshard.torch_xla_bridge.session.host_transfer import send as send_cpu_data_to_device
from isoshard.torch_xla_bridge.session.nested_search import ToXlaTensorArena, for_each_instance
from isoshard.torch_xla_bridge.session.rates import RateTracker
from isoshard.torch_xla_bridge.session.replicas import (
    broadcast_master_param,
    do_on_ordinals,
    get_local_ordinal,
    get_ordinal,
    is_master_ordinal,
    master_print,
    mesh_reduce,
    optimizer_step,
    reduce_gradients,
    rendezvous,
    save,
    set_replication,
    xla_real_devices,
    xla_rendezvous,
    xla_replication_devices,
)
from isoshard.torch_xla_bridge.session.replicas import gradients_of as _fetch_gradients  # noqa: F401

__all__ = [
    "REDUCE_AND",
    "REDUCE_MAX",
    "REDUCE_MIN",
    "REDUCE_MUL",
    "REDUCE_OR",
    "REDUCE_SUM",
    "XLA_LIB",
    "CoalescingBuckets",
    "DeviceContext",
    "MemoryInfo",
    "RateTracker",
    "ToXlaTensorArena",
    "add_step_closure",
    "all_gather",
    "all_gather_bucketized",
    "all_reduce",
    "all_reduce_bucketized_gradients",
    "all_to_all",
    "broadcast_master_param",
    "check_view_sharing",
    "collective_broadcast",
    "collective_permute",
    "do_on_ordinals",
    "fork_rng",
    "get_local_ordinal",
    "get_memory_info",
    "get_ordinal",
    "get_rng_state",
    "get_stablehlo",
    "get_stablehlo_bytecode",
    "get_xla_supported_devices",
    "is_master_ordinal",
    "is_xla_tensor",
    "mark_step",
    "master_print",
    "mesh_reduce",
    "optimization_barrier_",
    "optimizer_step",
    "recv",
    "reduce_gradients",
    "reduce_scatter",
    "reduce_scatter_bucketized",
    "rendezvous",
    "save",
    "send",
    "send_cpu_data_to_device",
    "set_replication",
    "set_rng_state",
    "unlazy",
    "wait_device_ops",
    "xla_device",
    "xla_device_hw",
    "xla_device_kind",
    "xla_real_devices",
    "xla_rendezvous",
    "xla_replication_devices",
]

Device = str | torch.device


class DeviceContext:
    """A device by its name.

    Args:
        device: the logical device.
    """

    def __init__(self, device: Device):
        """See the class."""
        self.device = device


def is_xla_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the logical device."""
    return tensor.device.type in naming.OURS


def xla_device_hw(device: Device) -> str:
    """What kind of chips a device has: `"CPU"`, `"TPU"`, `"CUDA"`.

    Args:
        device: the logical device.

    Raises:
        RuntimeError: it is none.
    """
    return hardware.kind(hardware.chips_of(device)[0])


def xla_device_kind(device: Device | None = None) -> str:
    """The model of the chips, in their maker's words, such as `"TPU v4"`.

    Args:
        device: the logical device; None means it too.
    """
    return hardware.chips_of(device)[0].device_kind


def mark_step(wait: bool = False, reset_scope: bool = True) -> None:
    """Execute what was recorded; the same as `torch_xla.sync`.

    Args:
        wait: also wait until the devices have finished.
        reset_scope: not used.
    """
    runtime.sync(wait=wait)


def wait_device_ops(devices: Sequence[Device] = ()) -> None:
    """Wait until the devices have finished what was started.

    Args:
        devices: not used; all are waited for.
    """
    jax.block_until_ready(jax.live_arrays())


def unlazy(tensors: Sequence[torch.Tensor]) -> None:
    """Execute what tensors need, and wait until they are there.

    Args:
        tensors: on the logical device.
    """
    for tensor in tensors:
        if isinstance(tensor, lazy_tensor.LazyTensor):
            reading.array_of(tensor).block_until_ready()


def set_rng_state(seed: int, device: Device | None = None) -> None:
    """Seed the random numbers of the device, or go back to where `get_rng_state` was called.

    Args:
        seed: a seed, or what `get_rng_state` returned.
        device: the logical device; None means it too.
    """
    hardware.chips_of(device)
    if 0 <= seed < 2**128:
        random_state.STATE.from_bytes(seed.to_bytes(16, "little"))
    else:
        random_state.STATE.manual_seed(seed)


def get_rng_state(device: Device | None = None) -> int:
    """The state of the device's random numbers.

    Right after `set_rng_state(seed)` it is the seed.

    Args:
        device: the logical device; None means it too.
    """
    hardware.chips_of(device)
    return int.from_bytes(random_state.STATE.to_bytes(), "little")


@contextlib.contextmanager
def fork_rng(device: Device | None = None, enabled: bool = True) -> Iterator[None]:
    """Context after which the random numbers go on where they stood before it.

    Args:
        device: the logical device; None means it too.
        enabled: False for a context that does nothing.
    """
    if not enabled:
        yield
        return
    state = get_rng_state(device)
    try:
        yield
    finally:
        set_rng_state(state, device)


def check_view_sharing(obj: Any) -> None:
    """Refuse data in which two tensors share memory.

    Args:
        obj: any nesting.

    Raises:
        RuntimeError: two different tensors do.
    """
    by_storage: dict[Any, torch.Tensor] = {}

    def check(tensor: Any) -> None:
        ours = isinstance(tensor, lazy_tensor.LazyTensor)
        memory = id(tensor._storage) if ours else tensor.untyped_storage().data_ptr()
        other = by_storage.setdefault((ours, memory), tensor)
        if other is not tensor and memory:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} and one of shape {tuple(other.shape)} "
                "share memory; use a .clone() of one of them"
            )

    for_each_instance(obj, lambda value: isinstance(value, torch.Tensor), check)
