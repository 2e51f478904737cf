"""The runtime, by torch_xla's names: counts, ordinals, SPMD mode, the compilation cache.

    import torch_xla.runtime as xr

Counts of *devices* and *replicas* are those of torch_xla's SPMD mode, in which there is one of
each. The chips are the *runtime devices*.

>>> world_size(), global_device_count(), global_runtime_device_count()
(1, 1, 8)
"""

from __future__ import annotations

import os
from typing import Any

import jax
import torch

from isoshard.core.kit import Device, compilation_cache
from isoshard.torch_bridge.kit import auto_spmd, hardware, is_spmd, naming, program, use_spmd
from isoshard.torch_xla_bridge.session.replicas import get_local_ordinal as local_ordinal
from isoshard.torch_xla_bridge.session.replicas import get_ordinal as global_ordinal

__all__ = [
    "addressable_device_count",
    "addressable_runtime_device_count",
    "auto_spmd",
    "device_type",
    "get_master_ip",
    "get_num_cached_compilation_graph",
    "global_device_count",
    "global_ordinal",
    "global_runtime_device_attributes",
    "global_runtime_device_count",
    "host_index",
    "initialize_cache",
    "is_bf16_supported",
    "is_spmd",
    "local_device_count",
    "local_ordinal",
    "local_process_count",
    "process_count",
    "process_index",
    "runtime_device_attributes",
    "set_device_type",
    "use_spmd",
    "world_size",
]

_PLATFORMS = {"CPU": "cpu", "TPU": "tpu", "CUDA": "cuda", "GPU": "cuda", "ROCM": "rocm"}


def set_device_type(pjrt_device: str) -> None:
    """Choose what to run on, before the first tensor is made.

    Args:
        pjrt_device: `"CPU"`, `"TPU"` or `"CUDA"`.

    Raises:
        ValueError: JAX knows no such platform.
        RuntimeError: JAX is running on another one already.
    """
    platform = pjrt_device.split("_")[0].upper()
    if platform not in _PLATFORMS:
        raise ValueError(f"{pjrt_device!r} is none of {', '.join(_PLATFORMS)}")
    if _has_started():
        if platform.replace("GPU", "CUDA") != device_type():
            raise RuntimeError(
                f"the device type cannot become {pjrt_device!r}: JAX is running on {device_type()} "
                "already. Call set_device_type before any tensor is made or device is listed."
            )
    else:
        jax.config.update("jax_platforms", _PLATFORMS[platform])
    os.environ["PJRT_DEVICE"] = pjrt_device


def _has_started() -> bool:
    """Whether JAX has chosen its devices: then their number is fixed."""
    before: Any = jax.config.jax_num_cpu_devices
    try:
        jax.config.update("jax_num_cpu_devices", max(before, 0) + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", before)
    return False


def device_type() -> str:
    """What the chips are: `"CPU"`, `"TPU"` or `"CUDA"`. Starts JAX's backend."""
    return hardware.kind(jax.devices()[0])


def is_bf16_supported() -> bool:
    """Whether tensors may be bfloat16: always, XLA computes it everywhere."""
    return True


def local_process_count() -> int:
    """How many processes run on this machine: `PJRT_LOCAL_PROCESS_COUNT`, or 1."""
    return int(os.environ.get("PJRT_LOCAL_PROCESS_COUNT", "1"))


def world_size() -> int:
    """How many replicas there are, and logical devices, of the job, a machine or a process: 1."""
    return 1


global_device_count = local_device_count = addressable_device_count = world_size


def process_index() -> int:
    """The number of this process in the job."""
    return jax.process_index()


def process_count() -> int:
    """How many processes the job has."""
    return jax.process_count()


def host_index() -> int:
    """The number of this machine in the job."""
    return jax.process_index() // local_process_count()


def global_runtime_device_count() -> int:
    """How many chips the job has. A mesh over all of them has this size."""
    return jax.device_count()


def addressable_runtime_device_count() -> int:
    """How many chips this process has."""
    return jax.local_device_count()


def runtime_device_attributes(device: str | torch.device) -> dict[str, object]:
    """What is known of a chip.

    Args:
        device: its name, such as `"TPU:0"`; the logical device stands for its first chip.

    Returns:
        Its name, and on a TPU `coords`, `core_on_chip` and `num_cores`.

    Raises:
        RuntimeError: there is no such device.
    """
    return _attributes(hardware.chips_of(device)[0])


def global_runtime_device_attributes() -> list[dict[str, object]]:
    """What is known of each chip of the job, in the order in which meshes number them."""
    return [_attributes(chip) for chip in jax.devices()]


def _attributes(chip: Device) -> dict[str, object]:
    attributes: dict[str, object] = {"name": hardware.chip_names([chip])[0]}
    for name in ("coords", "core_on_chip", "num_cores", "slice_index"):
        value = getattr(chip, name, None)
        if value is not None:
            attributes[name] = value
    return attributes


def get_master_ip() -> str:
    """The address of process 0: `MASTER_ADDR`, or this machine if there is no other process.

    Raises:
        RuntimeError: there are several processes, and `MASTER_ADDR` is not set.
    """
    address = os.environ.get("MASTER_ADDR")
    if address:
        return address
    if jax.process_count() == 1:
        return "127.0.0.1"
    raise RuntimeError(
        f"this is one of {jax.process_count()} processes, and the address of process 0 is not "
        "known: set MASTER_ADDR in all of them"
    )


_cache_is_set = False


def initialize_cache(path: str, readonly: bool = False) -> None:
    """Keep compiled programs on disk, for this process and later ones.

    `isoshard.compilation_cache(path)` does the same at any time.

    Args:
        path: the folder.
        readonly: read programs from it, and write none.

    Raises:
        RuntimeError: it was called before, or a program has been compiled already.
        OSError: the folder cannot be used.
    """
    global _cache_is_set
    if _cache_is_set or program.compiled_count():
        when = "by an earlier call" if _cache_is_set else "when the first program was compiled"
        raise RuntimeError(
            f"the compilation cache was initialised already, {when}; call initialize_cache once, "
            f"before {naming.current().type} tensors are used, or isoshard.compilation_cache(path) "
            "at any time"
        )
    compilation_cache.compilation_cache(path, readonly=readonly)
    _cache_is_set = True


def get_num_cached_compilation_graph() -> int:
    """How many compiled programs this process keeps in memory."""
    return program.compiled_count()
