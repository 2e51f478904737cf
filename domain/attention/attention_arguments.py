"""The arguments of an attention over several devices: checked together, and in one form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.blocks.known_shardings import lies, sharding_of
from isoshard.core.errors import ShardingError, SpecError, UnevenError
from isoshard.core.layout.axis_types import same_grid
from isoshard.core.layout.mesh import as_mesh, describe_mesh
from isoshard.core.layout.spec import axis_names, named_sharding, normalize_spec, same_layout
from isoshard.core.layout.spec_entries import entries_of
from isoshard.core.layout.uneven import UnevenArray, padded_of

from .setup import Axes, Extras, Setup, count

AxisLike = str | Sequence[str]
"""One mesh axis, or several, outermost first."""


class Given(NamedTuple):
    """Arguments that fit together.

    Attributes:
        mesh: the devices.
        ring: the mesh axes that split the sequence.
        batch: those that split the batch.
        heads: those that split the heads.
        arrays: queries, keys and values; padded where they are uneven.
        sizes: of the blocks of queries and of keys; None where they are even.
        extras: the masks, padded where they are uneven.
        scale: of the scores.
        rate: the share of weights that is dropped.
    """

    mesh: Mesh
    ring: Axes
    batch: Axes
    heads: Axes
    arrays: tuple[jax.Array, jax.Array, jax.Array]
    sizes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    extras: Extras
    scale: float
    rate: float


def check(
    what: str,
    arrays: tuple[Any, Any, Any],
    mesh: Any,
    axes: tuple[AxisLike, AxisLike | None, AxisLike | None],
    mask: Any,
    lengths: tuple[Any, Any],
    scale: float | None,
    dropout: tuple[float, Any],
    tile: int,
) -> Given:
    """Check what an attention was called with.

    Raises:
        SpecError: an axis is none of the mesh, or is used twice.
        UnevenError: the batch or the sequence does not divide, and is no UnevenArray.
        ShardingError: an array has another layout, or its sizes do not fit.
        ValueError: shapes, dtypes or numbers do not fit together; all faults in one message.
    """
    mesh = as_mesh(mesh, abstract=True)
    ring, batch, heads = _split(mesh, axes, what)
    plain = [x.array if isinstance(x, UnevenArray) else jnp.asarray(x) for x in arrays]
    q, k, v = plain
    rate, key = dropout
    faults = _shape_faults(q, k, v)
    if not faults:
        sizes = (k.shape[1], q.shape[1])
        faults += _mask_faults(mask, (q.shape[0], q.shape[2], sizes[1], sizes[0]))
        faults += _length_faults(lengths, q.shape[0])
    if not 0 <= rate < 1:
        faults.append(f"dropout is {rate}, and a share is at least 0 and below 1")
    elif rate and key is None:
        faults.append("dropout needs key=jax.random.key(..)")
    if tile < 1:
        faults.append(f"tile is {tile}, and needs at least 1")
    if faults:
        raise ValueError(f"{what} cannot take these arguments: {'; '.join(faults)}.")
    if q.shape[0] % count(mesh, batch):
        raise UnevenError(
            f"{what}: a batch of {q.shape[0]} does not split over {count(mesh, batch)} devices. "
            f"Pad it to {-(-q.shape[0] // count(mesh, batch)) * count(mesh, batch)}, or leave the "
            "batch whole."
        )
    found = _sizes(what, arrays, mask, count(mesh, ring))
    for name, x in zip("qkv", arrays, strict=True):
        _check_layout(f"{what}: {name}", x, mesh, P(batch or None, ring, heads or None), (0, 2))
    own = [None if n is None else jnp.asarray(n, jnp.int32) for n in lengths]
    masked = padded_of(mask)
    extras = Extras(None if masked is None else jnp.asarray(masked), *own)
    if rate:
        extras = extras._replace(key=_typed(key))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    return Given(mesh, ring, batch, heads, (q, k, v), found, extras, scale, float(rate))


def axes_of(axes: AxisLike | None, mesh: Mesh, name: str) -> Axes:
    """The names of mesh axes as a tuple."""
    entry = tuple(axes) if isinstance(axes, list | tuple) else axes
    (entry,) = (*entries_of(normalize_spec((entry,), mesh, 1, name=name)), None)[:1]
    return axis_names(entry)


def divided(given: Given, shards: int, what: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values whose heads divide; key heads are repeated if they are too few."""
    q, k, v = given.arrays
    heads, keys = q.shape[2], k.shape[2]
    if heads % shards or (keys % shards and shards % keys):
        raise UnevenError(
            f"{what}: {heads} heads of queries and {keys} of keys do not split over {shards} "
            "devices. The queries' must be a multiple of that, the keys' a multiple or a divisor: "
            "split the heads over fewer devices."
        )
    if keys % shards:
        k, v = (jnp.repeat(x, shards // keys, axis=2) for x in (k, v))
    return q, k, v


def check_mask(what: str, mask: Any, setup: Setup, extras: Extras) -> None:
    """Refuse a mask that would have to be gathered first."""
    if mask is not None:
        _check_layout(f"{what}: mask", mask, setup.mesh, extras.specs(setup).mask, (0, 1))


def result(given: Given, out: jax.Array, q: Any) -> jax.Array | UnevenArray:
    """What was computed, uneven if the queries are."""
    own = sharding_of(q)
    if isinstance(q, UnevenArray) and own is None:
        return UnevenArray(out, (*q.shape[:3], out.shape[3]), q.sizes)
    here: Any = (P.UNCONSTRAINED, None, P.UNCONSTRAINED)
    if isinstance(own, NamedSharding):
        here = (*(entries_of(own.spec) if same_grid(own.mesh, given.mesh) else ()), *[None] * 3)
    spec = P(given.batch or here[0], given.ring, given.heads or here[2])
    is_open = P.UNCONSTRAINED in entries_of(spec)
    layout = NamedSharding(given.mesh, spec) if is_open else named_sharding(spec, given.mesh, 4)
    if not isinstance(q, UnevenArray):
        return lies(out, layout)
    return UnevenArray(out, (*q.shape[:3], out.shape[3]), q.sizes, layout)


def _split(mesh: Mesh, axes, what: str) -> tuple[Axes, Axes, Axes]:
    names = ("axis", "batch", "heads")
    pairs = zip(axes, names, strict=True)
    ring, batch, heads = (axes_of(given, mesh, f"{what}: {name}") for given, name in pairs)
    if not ring:
        raise SpecError(f"{what}: axis names the mesh axes that split the sequence, not {axes[0]}")
    used = ring + batch + heads
    if twice := [name for name in dict.fromkeys(used) if used.count(name) > 1]:
        raise SpecError(
            f"{what}: mesh axis {', '.join(map(repr, twice))} is used twice; axis, batch and heads "
            f"are {ring}, {batch} and {heads}. Give each another axis of the mesh."
        )
    return ring, batch, heads


def _shape_faults(q, k, v) -> list[str]:
    shapes = f"q, k and v are {q.shape}, {k.shape} and {v.shape}"
    if {x.ndim for x in (q, k, v)} != {4}:
        return [f"{shapes}, and each is [batch, sequence, heads, width]"]
    faults = []
    if len({x.dtype for x in (q, k, v)}) > 1 or not jnp.issubdtype(q.dtype, jnp.floating):
        dtypes = f"{q.dtype}, {k.dtype} and {v.dtype}"
        faults.append(f"q, k and v are {dtypes}, and need one floating dtype")
    if len({x.shape[0] for x in (q, k, v)}) > 1:
        faults.append(f"{shapes}, of different batches")
    if q.shape[3] != k.shape[3]:
        faults.append(f"{shapes}: queries and keys differ in width")
    if k.shape[1:3] != v.shape[1:3]:
        faults.append(f"{shapes}: keys and values differ in length or heads")
    if 0 in (*q.shape, *k.shape, *v.shape):
        faults.append(f"{shapes}, and none may be empty")
    elif q.shape[2] % k.shape[2]:
        faults.append(f"{q.shape[2]} heads of queries are no multiple of {k.shape[2]} of keys")
    return faults


def _mask_faults(mask, whole: tuple[int, ...]) -> list[str]:
    if mask is None:
        return []
    shape = tuple(mask.array.shape if isinstance(mask, UnevenArray) else mask.shape)
    if mask.dtype != bool and not jnp.issubdtype(mask.dtype, jnp.floating):
        return [f"the mask is {mask.dtype}, and needs bool (True is visible) or floats to add"]
    if len(shape) != 4 or any(n not in (1, m) for n, m in zip(shape, whole, strict=False)):
        return [f"the mask is {shape}, which is not {whole} or 1 in places"]
    return []


def _length_faults(lengths: tuple[Any, Any], batch: int) -> list[str]:
    return [
        f"{name}_seq_lengths is {jnp.shape(given)}, and needs one number per sample, ({batch},)"
        for name, given in zip(("query", "key_value"), lengths, strict=True)
        if given is not None and jnp.shape(given) != (batch,)
    ]


def _sizes(what: str, arrays, mask, blocks: int):
    """The sizes of the blocks of queries and of keys, once it is sure that all agree."""
    found = [_own_sizes(f"{what}: {n}", x, blocks) for n, x in zip("qkv", arrays, strict=True)]
    if found[1] != found[2]:
        raise ShardingError(
            f"{what}: keys are in blocks of {found[1] or 'one size'}, and values of "
            f"{found[2] or 'one size'}. Lay them out alike."
        )
    if mask is not None:
        sizes = mask.sizes if isinstance(mask, UnevenArray) else (None,) * 4
        wanted = [None if n == 1 else own for n, own in zip(mask.shape[2:], found, strict=False)]
        if list(sizes[2:]) != wanted or any(sizes[:2]):
            raise ShardingError(
                f"{what}: the mask is in blocks of {sizes}, and queries and keys of "
                f"{found[0]} and {found[1]}. Make it an UnevenArray of the same blocks, or give "
                "lengths instead."
            )
    return found[0], found[1]


def _own_sizes(name: str, x, blocks: int) -> tuple[int, ...] | None:
    if not isinstance(x, UnevenArray):
        if x.shape[1] % blocks:
            raise UnevenError(
                f"{name}: a sequence of {x.shape[1]} does not split over {blocks} devices. Pad it "
                f"to {-(-x.shape[1] // blocks) * blocks} and give query_seq_lengths and "
                "key_value_seq_lengths, or pass an UnevenArray."
            )
        return None
    if any(sizes is not None for axis, sizes in enumerate(x.sizes) if axis != 1):
        raise ShardingError(f"{name}: only the sequence may be uneven, and given is {x!r}")
    sizes = x.sizes[1]
    if sizes is not None and len(sizes) != blocks:
        raise ShardingError(
            f"{name}: the sequence has {len(sizes)} blocks, and its mesh axes {blocks} devices. "
            "Give one block per device."
        )
    if sizes is None and x.shape[1] % blocks:
        raise UnevenError(f"{name}: a sequence of {x.shape[1]} does not split over {blocks}")
    return sizes


def _check_layout(name: str, x, mesh: Mesh, wanted: P, open_axes: tuple[int, ...]) -> None:
    """Refuse an array that would have to be gathered first; a traced one says nothing of itself."""
    sharding = sharding_of(x)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return
    asked = named_sharding(wanted, mesh, 4)
    if not same_grid(sharding.mesh, mesh):
        if not same_layout(sharding, asked, 4):
            raise ShardingError(
                f"{name} lies as {sharding.spec} on a mesh of {describe_mesh(sharding.mesh)}, "
                f"and is asked for as {asked.spec} on one of {describe_mesh(mesh)}. Pass that mesh,"
                " or iso.reshard it first."
            )
        return
    wants = [axis_names(entry) for entry in entries_of(asked.spec)] + [()] * 4
    used = {axis for want in wants for axis in want}
    for axis, entry in enumerate(entries_of(sharding.spec)):
        have, want = axis_names(entry), wants[axis]
        left_to_xla = not want and axis in open_axes and not used & set(have)
        if have and have != want and not left_to_xla:
            raise ShardingError(
                f"{name} lies as {sharding.spec}, and is asked for as {asked.spec}: axis {axis} "
                "would be gathered. Name the mesh axes it lies on, or iso.reshard it first."
            )


def _typed(key) -> jax.Array:
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    return jax.random.wrap_key_data(key)
