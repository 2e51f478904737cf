"""Buffers of torch_xla and JAX: shared through DLPack, or copied through the host.

On the CPU and without SPMD both use the same memory. Under SPMD torch_xla neither exports nor
imports shards (its DLPack functions fail, and end the process), so both directions copy through the
host, and `copy=False` raises.

A write to shared memory is visible on both sides; torch_xla itself never writes to memory that it
has shared, as its in-place operations allocate new buffers.
"""

from __future__ import annotations

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding, SingleDeviceSharding

from isoshard.core.kit import (
    CopyError,
    Tracer,
    check_even,
    host_to_jax,
    mesh_of,
    metrics,
    reshard_array,
)
from isoshard.torch_bridge.kit import from_numpy, logical_dtype, to_numpy

from .backend_marks import annotation, mark, sharding_of
from .backend_mesh import device_by_id, mesh_to_torch_xla
from .real import execute, is_spmd, load, plain


def to_jax(
    tensor: torch.Tensor,
    sharding: NamedSharding | None = None,
    *,
    copy: bool | None = None,
    name: str = "tensor",
) -> jax.Array:
    """Convert a tensor of torch_xla to a `jax.Array`; executes the operations it depends on.

    Args:
        tensor: on torch_xla's device.
        sharding: of the array; by default that of the tensor.
        copy: None shares memory where that is possible, False shares or raises, True copies.
        name: of the tensor, for messages.

    Returns:
        The array. Its memory is the tensor's on a CPU without SPMD.

    Raises:
        CopyError: memory cannot be shared under copy=False, a value or dtype has no equal, or the
            tensor has a graph for gradients.
        UnevenError: torch_xla padded the shards, and JAX has no such layout.
    """
    bare = plain(tensor)
    if tensor.grad_fn is not None:
        raise CopyError(
            f"{name} was computed from tensors that require grad, and JAX would not see the "
            "graph; pass tensor.detach()"
        )
    if is_spmd() and copy is False:
        raise _refusal(name, "under SPMD torch_xla does not export its shards")
    execute(bare)
    if is_spmd():
        return reshard_array(_from_shards(tensor, bare, name), sharding, name=name)
    host = _view(bare, name, copy)
    return host_to_jax(to_numpy(host), sharding, copy=copy, name=name)


def from_jax(array: jax.Array, *, copy: bool | None = None) -> torch.Tensor:
    """Convert a `jax.Array` to a tensor of torch_xla.

    Args:
        array: on one device, or sharded over all of them.
        copy: None shares memory where that is possible, False shares or raises, True copies.

    Returns:
        A tensor of the same dtype on torch_xla's device. Under SPMD it has the sharding of
        `array`; without, its memory on a CPU, if `array` is on one device.

    Raises:
        CopyError: memory cannot be shared under copy=False.
        DeviceError: under SPMD, the array is on a mesh of fewer devices than torch_xla's.
        TypeError: it is no jax.Array, is traced, or torch has no such dtype.
    """
    if not isinstance(array, jax.Array) or isinstance(array, Tracer):
        raise TypeError(f"from_jax takes a jax.Array that has data; got {array!r}")
    dtype = logical_dtype(array.dtype)
    if is_spmd():
        if copy is False:
            raise _refusal("array", "under SPMD torch_xla does not import shards")
        return _to_shards(array, dtype)
    why = _why_copied(array)
    if why and copy is False:
        raise _refusal("array", why)
    if why or copy:
        return _on_device(array, dtype)
    view = torch.from_dlpack(array.addressable_data(0).block_until_ready())
    return load("torch_xla.utils.dlpack").from_dlpack(view)


def _view(bare: torch.Tensor, name: str, copy: bool | None) -> torch.Tensor:
    """The memory of a tensor on one device, as a CPU tensor."""
    why = _why_no_dlpack()
    if bare.dtype.is_floating_point and bare.dtype.itemsize == 1:
        why = f"DLPack has no {bare.dtype} here"
    if not why:
        return torch.from_dlpack(load("torch_xla.utils.dlpack").to_dlpack(bare))
    if copy is False:
        raise _refusal(name, why)
    _count_copies(bare.nbytes)
    return bare.cpu()


def _from_shards(tensor: torch.Tensor, bare: torch.Tensor, name: str) -> jax.Array:
    """Each device's shard, copied through the host."""
    source = sharding_of(tensor)
    shape = tuple(tensor.shape)
    check_even(source.spec, mesh_of(source), shape, name=name)
    if not annotation(bare):
        _count_copies(bare.nbytes)
        return host_to_jax(to_numpy(bare.cpu()), source, name=name)
    shards = load("torch_xla.distributed.spmd").XLAShardedTensor(bare).local_shards
    arrays_ = []
    for shard in shards:
        _count_copies(shard.data.nbytes)
        device = device_by_id(int(shard.shard_device.rpartition(":")[2]))
        host = to_numpy(shard.data)
        arrays_.append(host_to_jax(host, SingleDeviceSharding(device), name=name))
    return jax.make_array_from_single_device_arrays(shape, source, arrays_)


def _to_shards(array: jax.Array, dtype: torch.dtype) -> torch.Tensor:
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or len(sharding.device_set) == 1:
        return _on_device(array, dtype)
    mesh_to_torch_xla(mesh_of(sharding))  # raises, before anything is copied, if it has no such
    return mark(_on_device(array, dtype), sharding)


def _on_device(array: jax.Array, dtype: torch.dtype) -> torch.Tensor:
    return _host(array, dtype).to(load("torch_xla").device())


def _host(array: jax.Array, dtype: torch.dtype) -> torch.Tensor:
    _count_copies(array.nbytes)
    return from_numpy(np.array(array), dtype)


def _why_copied(array: jax.Array) -> str:
    if not array.is_fully_replicated:
        return f"its shards are on {len(array.sharding.device_set)} devices"
    platform = next(iter(array.devices())).platform
    if platform != "cpu":
        return f"the array is on {platform}"
    if array.dtype.name.startswith("float8"):
        return f"DLPack has no {array.dtype.name} here"
    return _why_no_dlpack()


def _why_no_dlpack() -> str:
    kind = load("torch_xla.runtime").device_type()
    return "" if kind == "CPU" else f"torch_xla runs on {kind}, and its DLPack takes only CPUs"


def _refusal(name: str, why: str) -> CopyError:
    return CopyError(
        f"{name}: torch_xla and JAX cannot share memory under copy=False: {why}. "
        "Pass copy=None or copy=True."
    )


def _count_copies(size: int) -> None:
    metrics.count("copies")
    metrics.count("copied_bytes", size)
