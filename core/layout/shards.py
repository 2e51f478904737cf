"""Shards: the data of an array on this process's devices, without copies.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> mesh = make_mesh((2, 4), ("x", "y"))
>>> a = shard(np.arange(16, dtype=np.int32).reshape(8, 2), mesh, ("y", None))
>>> pieces = local_shards(a)
>>> len(pieces), pieces[5].index, pieces[5].replica_id
(8, (slice(2, 4, None), slice(None, None, None)), 1)
>>> pieces[5].data
Array([[4, 5],
       [6, 7]], dtype=int32)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from isoshard.core.errors import ShardingError
from isoshard.core.frameworks import framework_of, require
from isoshard.core.runtime._jax_internals.tracers import Tracer

from .mesh import mesh_of
from .partial_sums import check_no_sums
from .uneven import UnevenArray, runs_of
from .virtual_devices import Device


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """One device's data of an array.

    Attributes:
        index: its slice of the global array, one slice per axis.
        device: its JAX device.
        replica_id: 0 for the first device with this shard, 1 for the next.
        data: its elements, sharing memory with the array: a jax.Array on one device, or a plain
            tensor of the requested framework.

    Example:
        >>> piece = local_shards(jax.numpy.arange(3))[0]
        >>> piece.index, piece.replica_id, piece.data.tolist()
        ((slice(None, None, None),), 0, [0, 1, 2])
    """

    index: tuple[slice, ...]
    device: Device
    replica_id: int
    data: Any


def local_shards(x: Any, framework: str = "jax") -> list[Shard]:
    """List the shards of an array on this process's devices, in mesh order.

    Args:
        x: a jax.Array, an `UnevenArray`, or an array of a framework with a bridge.
        framework: of the data, "jax" or "torch". "torch" gives plain CPU or CUDA tensors which
            share the buffers; writing to them changes an array that JAX assumes to be immutable.

    Returns:
        One `Shard` per addressable device. Those of an UnevenArray are without padding: as
        "torch" data views of the buffers, as "jax" data copies of padded shards.

    Raises:
        ShardingError: the array is traced and has no data yet, it has unreduced axes, or
            `framework` is unknown.
        ImportError: torch is not installed.
        CopyError: a shard cannot be shared with torch.
        TypeError: `x` is no such array.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> from isoshard.core.transfer.device_put import shard
        >>> a = shard(np.arange(4, dtype=np.int32), make_mesh((2,), ("x",)), ("x",))
        >>> [piece.data.tolist() for piece in local_shards(a)]
        [[0, 1], [2, 3]]
    """
    if framework not in ("jax", "torch"):
        raise ShardingError(f"shards come as 'jax' or 'torch' data, not as {framework!r}")
    owner = framework_of(x)
    if owner is not None and owner.name == framework:
        return owner.local_shards(x)
    if owner is not None:
        x = owner.array(x, copy=False)
    if isinstance(x, UnevenArray):
        return _without_padding(x, framework)
    if not isinstance(x, jax.Array):
        raise TypeError(f"only an array has shards, not a {type(x).__name__}. {_hint(x)}")
    if isinstance(x, Tracer):
        raise ShardingError(
            "a traced value has no shards; call local_shards outside jit, grad and vmap"
        )
    check_no_sums(x.sharding, "a device has a term of it (see x.addressable_shards), no shard")
    shards = _in_mesh_order(x)
    if framework == "jax":
        return [Shard(p.index, p.device, p.replica_id, p.data) for p in shards]
    convert = require("torch").shard_from_jax
    return [Shard(p.index, p.device, p.replica_id, convert(p.data, copy=False)) for p in shards]


def _without_padding(u: UnevenArray, framework: str) -> list[Shard]:
    """The valid elements of each shard, with their index in the true array."""
    exact = []
    for shard in local_shards(u.array, framework):
        axes = [
            runs_of(range_, extent, sizes)
            for range_, extent, sizes in zip(shard.index, u.array.shape, u.sizes, strict=True)
        ]
        if any(len(runs) > 1 for runs in axes):
            raise ShardingError(
                f"an UnevenArray of shape {u.shape} with sizes {u.sizes} has shards of several "
                "blocks with padding between them, which are no slices of it; shard it with one "
                "block per device: iso.reshard(u, mesh, spec)"
            )
        valid = [inside for ((inside, _),) in axes]
        index = [
            range_ if sizes is None else true
            for range_, sizes, ((_, true),) in zip(shard.index, u.sizes, axes, strict=True)
        ]
        is_unpadded = all(h == slice(0, n) for h, n in zip(valid, shard.data.shape, strict=True))
        data = shard.data if is_unpadded else shard.data[tuple(valid)]
        exact.append(Shard(tuple(index), shard.device, shard.replica_id, data))
    return exact


def _in_mesh_order(x: jax.Array) -> list[Any]:
    if not isinstance(x.sharding, NamedSharding):
        return list(x.addressable_shards)
    by_device = {shard.device: shard for shard in x.addressable_shards}
    return [by_device[d] for d in mesh_of(x.sharding).devices.flat if d in by_device]


def _hint(x: Any) -> str:
    if isinstance(x, np.ndarray):
        return "Shard it first: iso.shard(x, mesh, spec)."
    return "Take the shards of each leaf: jax.tree.map(iso.local_shards, x)."
