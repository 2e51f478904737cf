"""JAX arrays from one layout to another, also across processes.

Over one set of devices the compiler moves the data, and every process that has some of the devices
must take part. Otherwise each process places what its own devices are to hold out of what it has
whole, and asks no other.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding, Sharding

from isoshard.core.errors import ShardingError, no_sharing
from isoshard.core.layout.axis_types import beside, constrain, on_mesh, same_grid
from isoshard.core.layout.in_shard_map import manual_axes, sharding_here
from isoshard.core.layout.partial_sums import resharded, same_terms, stored, unreduced
from isoshard.core.layout.spec import same_layout
from isoshard.core.layout.virtual_devices import Device
from isoshard.core.runtime._jax_internals.tracers import Tracer

from .host_memory import HostSlice, cuts_of


def lay_out(
    x: jax.Array, sharding: Sharding | None, *, copy: bool | None = None, name: str = "array"
) -> jax.Array:
    """Lay a JAX array out over devices.

    Args:
        x: on any devices, or traced.
        sharding: the layout; axes split evenly. None keeps the one of `x`. Over other devices of
            several processes than those of `x`, each process must have `x` whole, as a replicated
            array or one of its own; it places the slices of its own devices.
        copy: None shares the buffers that are where they belong, False shares all or raises, True
            shares none.
        name: of the array, for messages.

    Returns:
        The array; a traced value is constrained, and stays on Auto axes of that grid if it is
        on them.

    Raises:
        CopyError: data must move, and copy is False.
        ShardingError: this process does not have what its devices are to hold, or `jax.shard_map`
            runs over the axes asked for.
    """
    if sharding is not None and manual_axes():
        sharding = sharding_here(x, sharding, name)
    if isinstance(x, Tracer):
        if isinstance(sharding, NamedSharding):
            sharding = beside(x, sharding)
        return x if sharding is None else constrain(x, sharding)
    if not copy and (sharding is None or x.sharding is sharding):
        return x
    sharding = sharding or x.sharding
    if copy is False and not same_layout(x.sharding, sharding, x.ndim):
        raise no_sharing(name, f"its data must move from {x.sharding} to {sharding}")
    if copy:  # first where it is: on the way to another layout JAX shares all the same
        x = _copied(x)
    if unreduced(x.sharding) or unreduced(sharding):
        return x if x.sharding == sharding else _through_sums(x, sharding)
    if x.is_fully_addressable and sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if x.sharding.device_set == sharding.device_set and isinstance(x.sharding, NamedSharding):
        return _moved(x, sharding)
    cuts = cuts_of(sharding, x.shape)
    return place_cuts(whole_here(x, sharding, name) if cuts else x, sharding, x.shape, cuts)


def place_cuts(
    x: jax.Array,
    sharding: Sharding,
    shape: tuple[int, ...],
    cuts: Sequence[HostSlice],
    *,
    copy: bool | None = None,
) -> jax.Array:
    """Lay out an array of which this process has what its own devices are to hold, or more.

    Args:
        x: on devices of this process.
        sharding: the layout.
        shape: of the whole array.
        cuts: of `x`, one per device of this process.
        copy: True shares nothing; otherwise a slice that is all of `x` and on its device already
            is shared.

    Returns:
        The array.
    """
    x = _copied(x) if copy else x
    devices = x.devices()
    pieces = []
    for cut in cuts:
        size = [len(range(*part.indices(n))) for part, n in zip(cut.index, x.shape, strict=True)]
        piece = x if tuple(size) == x.shape else x[cut.index]
        pieces.append(piece if devices == {cut.device} else jax.device_put(piece, cut.device))
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces, dtype=x.dtype)


def whole_here(x: jax.Array, sharding: Sharding, name: str) -> jax.Array:
    """The same array over devices of this process only.

    Args:
        x: the array.
        sharding: where it is wanted, for the message.
        name: of the array, for messages.

    Returns:
        `x`, or this process's copy of it.

    Raises:
        ShardingError: it is partly, or altogether, in other processes.
    """
    if x.is_fully_addressable:
        return x
    if x.is_fully_replicated and x.addressable_shards:
        return x.addressable_data(0)
    have, want = list(x.sharding.device_set), list(sharding.device_set)
    raise ShardingError(
        f"{name}: its pieces are on {_told(have)}, and are wanted on {_told(want)}; the compiler "
        f"moves data within one set of devices, and process {jax.process_index()} does not have "
        "the array whole. Gather it first, in every process that has a piece: "
        "iso.shard(iso.full(x), mesh, spec)."
    )


def _through_sums(x: jax.Array, sharding: Sharding) -> jax.Array:
    """Take sums that are not asked for, lay the array out, and make the terms that are."""
    if same_layout(x.sharding, sharding, x.ndim):  # of which device_put makes a copy
        pieces = [piece.data for piece in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, pieces, dtype=x.dtype)
    have, want = unreduced(x.sharding), unreduced(sharding)
    if have and isinstance(x.sharding, NamedSharding):
        mesh = x.sharding.mesh
        alike = isinstance(sharding, NamedSharding) and same_grid(mesh, sharding.mesh)
        if not (alike and same_terms(x.sharding, sharding)):
            x = resharded(x, on_mesh(stored(sharding if alike else x.sharding), mesh))
    if not want:
        return lay_out(x, sharding)
    if not unreduced(x.sharding):
        x = lay_out(x, stored(sharding))
    return resharded(x, sharding)


def _moved(x: jax.Array, sharding: Sharding) -> jax.Array:
    """Change the layout by a program that every process with some of the devices runs.

    XLA's CPU collectives send bfloat16 as float32: twice the bytes, and signalling NaNs come out
    as quiet ones. As integers the bits cross as they are.
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
    """The same layout in memory of its own, each shard copied where it is."""
    if x.is_fully_addressable:
        return jax.device_put(x, x.sharding, may_alias=False)
    mine = x.addressable_shards
    pieces = [jax.device_put(piece.data, piece.device, may_alias=False) for piece in mine]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, pieces, dtype=x.dtype)


def _told(devices: Sequence[Device]) -> str:
    count = len(devices)
    processes = sorted({device.process_index for device in devices})
    ranks = ", ".join(map(str, processes))
    return f"{count} device{'s' * (count > 1)} of process{'es' * (len(processes) > 1)} {ranks}"
