"""Resharding of JAX arrays, also across processes.

Over one set of devices the compiler moves the data, and every process that owns any of the devices
must take part. Otherwise each process needs the full array, and puts the shards of its own devices,
without communication.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding, Sharding

from isoshard.core.errors import ShardingError, no_sharing
from isoshard.core.layout.axis_types import constrain, on_mesh, on_value_mesh, same_grid
from isoshard.core.layout.in_shard_map import manual_axes, manual_sharding
from isoshard.core.layout.partial_sums import resharded, same_terms, stored, unreduced
from isoshard.core.layout.spec import same_layout
from isoshard.core.layout.virtual_devices import Device
from isoshard.core.runtime._jax_internals.tracers import Tracer

from .host_memory import HostSlice, host_slices


def reshard_array(
    x: jax.Array, sharding: Sharding | None, *, copy: bool | None = None, name: str = "array"
) -> jax.Array:
    """Put a JAX array into a sharding.

    Args:
        x: on any devices, or traced.
        sharding: the target, even. None keeps that of `x`. Over other devices of several processes
            than those of `x`, each process must have the full `x`, as a replicated array or a local
            one; it puts the slices of its own devices.
        copy: None shares the buffers that need not move, False shares all or raises, True shares
            none.
        name: of the array, for messages.

    Returns:
        The array; a traced value is constrained, and remains on Auto axes of that grid if it is
        on them.

    Raises:
        CopyError: data must move, and copy is False.
        ShardingError: this process does not have the data of its devices, or `jax.shard_map` runs
            over axes of the target.
    """
    if sharding is not None and manual_axes():
        sharding = manual_sharding(x, sharding, name)
    if isinstance(x, Tracer):
        if isinstance(sharding, NamedSharding):
            sharding = on_value_mesh(x, sharding)
        return x if sharding is None else constrain(x, sharding)
    if not copy and (sharding is None or x.sharding is sharding):
        return x
    sharding = sharding or x.sharding
    if copy is False and not same_layout(x.sharding, sharding, x.ndim):
        raise no_sharing(name, f"its data must move from {x.sharding} to {sharding}")
    if copy:  # before resharding, which shares the buffers that need not move
        x = _copied(x)
    if unreduced(x.sharding) or unreduced(sharding):
        return x if x.sharding == sharding else _through_sums(x, sharding)
    if x.is_fully_addressable and sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if x.sharding.device_set == sharding.device_set and isinstance(x.sharding, NamedSharding):
        return _moved(x, sharding)
    slices = host_slices(sharding, x.shape)
    return put_slices(
        addressable_copy(x, sharding, name) if slices else x, sharding, x.shape, slices
    )


def put_slices(
    x: jax.Array,
    sharding: Sharding,
    shape: tuple[int, ...],
    slices: Sequence[HostSlice],
    *,
    copy: bool | None = None,
) -> jax.Array:
    """Put slices of `x`, one for each of this process's devices, as shards of a global array.

    Args:
        x: on devices of this process.
        sharding: the sharding of the global array.
        shape: the global shape.
        slices: of `x`, one per device of this process.
        copy: True shares nothing; otherwise a slice that is all of `x`, on the target device
            already, is shared.
    """
    x = _copied(x) if copy else x
    devices = x.devices()
    shards = []
    for slice_ in slices:
        size = [
            len(range(*range_.indices(n))) for range_, n in zip(slice_.index, x.shape, strict=True)
        ]
        shard = x if tuple(size) == x.shape else x[slice_.index]
        shards.append(shard if devices == {slice_.device} else jax.device_put(shard, slice_.device))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=x.dtype)


def addressable_copy(x: jax.Array, sharding: Sharding, name: str) -> jax.Array:
    """The full array on devices of this process: `x`, or its local replica.

    Raises:
        ShardingError: some shards are in other processes only.
    """
    if x.is_fully_addressable:
        return x
    if x.is_fully_replicated and x.addressable_shards:
        return x.addressable_data(0)
    have, want = list(x.sharding.device_set), list(sharding.device_set)
    raise ShardingError(
        f"{name}: its shards are on {_devices_text(have)}, and the target is "
        f"{_devices_text(want)}; the compiler moves data within one set of devices, and process "
        f"{jax.process_index()} does not have the full array. Gather it first, in every process "
        "that has a shard: iso.shard(iso.full(x), mesh, spec)."
    )


def _through_sums(x: jax.Array, sharding: Sharding) -> jax.Array:
    """Reduce axes that the target does not leave unreduced, reshard, and split sums into terms."""
    if same_layout(x.sharding, sharding, x.ndim):  # jax.device_put would copy
        shards = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, shards, dtype=x.dtype)
    have, want = unreduced(x.sharding), unreduced(sharding)
    if have and isinstance(x.sharding, NamedSharding):
        mesh = x.sharding.mesh
        is_same_grid = isinstance(sharding, NamedSharding) and same_grid(mesh, sharding.mesh)
        if not (is_same_grid and same_terms(x.sharding, sharding)):
            x = resharded(x, on_mesh(stored(sharding if is_same_grid else x.sharding), mesh))
    if not want:
        return reshard_array(x, sharding)
    if not unreduced(x.sharding):
        x = reshard_array(x, stored(sharding))
    return resharded(x, sharding)


def _moved(x: jax.Array, sharding: Sharding) -> jax.Array:
    """Reshard by a program that every process with any of the devices runs.

    XLA's CPU collectives send bfloat16 as float32: twice the bytes, and signalling NaNs become
    quiet. As integers the bits are preserved.
    """
    if same_layout(x.sharding, sharding, x.ndim) or x.dtype != jax.numpy.bfloat16:
        return jax.device_put(x, sharding)
    return _as_bfloat16(jax.device_put(_as_bits(x), sharding))


@jax.jit
def _as_bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jax.numpy.uint16)


@jax.jit
def _as_bfloat16(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jax.numpy.bfloat16)


def _copied(x: jax.Array) -> jax.Array:
    """A copy with the same sharding, each shard copied on its device."""
    if x.is_fully_addressable:
        return jax.device_put(x, x.sharding, may_alias=False)
    local_shards = x.addressable_shards
    shards = [jax.device_put(shard.data, shard.device, may_alias=False) for shard in local_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards, dtype=x.dtype)


def _devices_text(devices: Sequence[Device]) -> str:
    count = len(devices)
    processes = sorted({device.process_index for device in devices})
    ranks = ", ".join(map(str, processes))
    return f"{count} device{'s' * (count > 1)} of process{'es' * (len(processes) > 1)} {ranks}"
