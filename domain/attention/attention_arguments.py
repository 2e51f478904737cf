"""The arguments of an attention over several devices: checked together, and in one form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.kit import (
    ShardingError,
    SpecError,
    UnevenArray,
    UnevenError,
    as_mesh,
    describe_mesh,
    entries_of,
    named_sharding,
    normalize_spec,
    padded_of,
    record_sharding,
    same_grid,
    same_layout,
    sharding_of,
)
from isoshard.core.kit import spec_axis_names as axis_names

from .setup import Axes, Extras, Setup, count

AxisLike = str | Sequence[str]
"""One mesh axis, or several, outermost first."""


class AttentionArguments(NamedTuple):
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
    verb: str,
    arrays: tuple[Any, Any, Any],
    mesh: Any,
    axes: tuple[AxisLike, AxisLike | None, AxisLike | None],
    mask: Any,
    lengths: tuple[Any, Any],
    scale: float | None,
    dropout: tuple[float, Any],
    tile: int,
) -> AttentionArguments:
    """Check what an attention was called with.

    Raises:
        SpecError: an axis is none of the mesh, or is used twice.
        UnevenError: the batch or the sequence does not divide, and is no UnevenArray.
        ShardingError: an array has another sharding, or its sizes do not fit.
        ValueError: shapes, dtypes or numbers do not fit together; all errors in one message.
    """
    mesh = as_mesh(mesh, abstract=True)
    ring, batch, heads = _split(mesh, axes, verb)
    plain = [x.array if isinstance(x, UnevenArray) else jnp.asarray(x) for x in arrays]
    q, k, v = plain
    rate, key = dropout
    errors = _shape_errors(q, k, v)
    if not errors:
        sizes = (k.shape[1], q.shape[1])
        errors += _mask_errors(mask, (q.shape[0], q.shape[2], sizes[1], sizes[0]))
        errors += _length_errors(lengths, q.shape[0])
    if not 0 <= rate < 1:
        errors.append(f"dropout is {rate}, and a share is at least 0 and below 1")
    elif rate and key is None:
        errors.append("dropout needs key=jax.random.key(..)")
    if tile < 1:
        errors.append(f"tile is {tile}, and needs at least 1")
    if errors:
        raise ValueError(f"{verb} cannot take these arguments: {'; '.join(errors)}.")
    if q.shape[0] % count(mesh, batch):
        raise UnevenError(
            f"{verb}: a batch of {q.shape[0]} does not split over {count(mesh, batch)} devices. "
            f"Pad it to {-(-q.shape[0] // count(mesh, batch)) * count(mesh, batch)}, or leave the "
            "batch unsplit."
        )
    block_sizes = _sizes(verb, arrays, mask, count(mesh, ring))
    for name, x in zip("qkv", arrays, strict=True):
        _check_sharding(f"{verb}: {name}", x, mesh, P(batch or None, ring, heads or None), (0, 2))
    sample_lengths = [None if n is None else jnp.asarray(n, jnp.int32) for n in lengths]
    masked = padded_of(mask)
    extras = Extras(None if masked is None else jnp.asarray(masked), *sample_lengths)
    if rate:
        extras = extras._replace(key=_typed(key))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    return AttentionArguments(
        mesh, ring, batch, heads, (q, k, v), block_sizes, extras, scale, float(rate)
    )


def axes_of(axes: AxisLike | None, mesh: Mesh, name: str) -> Axes:
    """The names of mesh axes as a tuple."""
    entry = tuple(axes) if isinstance(axes, list | tuple) else axes
    (entry,) = (*entries_of(normalize_spec((entry,), mesh, 1, name=name)), None)[:1]
    return axis_names(entry)


def divided(
    args: AttentionArguments, shards: int, verb: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values whose heads divide; key heads are repeated if they are too few."""
    q, k, v = args.arrays
    heads, keys = q.shape[2], k.shape[2]
    if heads % shards or (keys % shards and shards % keys):
        raise UnevenError(
            f"{verb}: {heads} heads of queries and {keys} of keys do not split over {shards} "
            "devices. The queries' must be a multiple of that, the keys' a multiple or a divisor: "
            "split the heads over fewer devices."
        )
    if keys % shards:
        k, v = (jnp.repeat(x, shards // keys, axis=2) for x in (k, v))
    return q, k, v


def check_mask(verb: str, mask: Any, setup: Setup, extras: Extras) -> None:
    """Raise for a mask that would have to be gathered first."""
    if mask is not None:
        _check_sharding(f"{verb}: mask", mask, setup.mesh, extras.specs(setup).mask, (0, 1))


def result(args: AttentionArguments, out: jax.Array, q: Any) -> jax.Array | UnevenArray:
    """What was computed, uneven if the queries are."""
    q_sharding = sharding_of(q)
    if isinstance(q, UnevenArray) and q_sharding is None:
        return UnevenArray(out, (*q.shape[:3], out.shape[3]), q.sizes)
    open_entries: Any = (P.UNCONSTRAINED, None, P.UNCONSTRAINED)
    if isinstance(q_sharding, NamedSharding):
        open_entries = (
            *(entries_of(q_sharding.spec) if same_grid(q_sharding.mesh, args.mesh) else ()),
            *[None] * 3,
        )
    spec = P(args.batch or open_entries[0], args.ring, args.heads or open_entries[2])
    is_open = P.UNCONSTRAINED in entries_of(spec)
    sharding = NamedSharding(args.mesh, spec) if is_open else named_sharding(spec, args.mesh, 4)
    if not isinstance(q, UnevenArray):
        return record_sharding(out, sharding)
    return UnevenArray(out, (*q.shape[:3], out.shape[3]), q.sizes, sharding)


def _split(mesh: Mesh, axes, verb: str) -> tuple[Axes, Axes, Axes]:
    names = ("axis", "batch", "heads")
    pairs = zip(axes, names, strict=True)
    ring, batch, heads = (axes_of(entry, mesh, f"{verb}: {name}") for entry, name in pairs)
    if not ring:
        raise SpecError(f"{verb}: axis names the mesh axes that split the sequence, not {axes[0]}")
    used = ring + batch + heads
    if twice := [name for name in dict.fromkeys(used) if used.count(name) > 1]:
        raise SpecError(
            f"{verb}: mesh axis {', '.join(map(repr, twice))} is used twice; axis, batch and heads "
            f"are {ring}, {batch} and {heads}. Give each another axis of the mesh."
        )
    return ring, batch, heads


def _shape_errors(q, k, v) -> list[str]:
    shapes = f"q, k and v are {q.shape}, {k.shape} and {v.shape}"
    if {x.ndim for x in (q, k, v)} != {4}:
        return [f"{shapes}, and each is [batch, sequence, heads, width]"]
    errors = []
    if len({x.dtype for x in (q, k, v)}) > 1 or not jnp.issubdtype(q.dtype, jnp.floating):
        dtypes = f"{q.dtype}, {k.dtype} and {v.dtype}"
        errors.append(f"q, k and v are {dtypes}, and need one floating dtype")
    if len({x.shape[0] for x in (q, k, v)}) > 1:
        errors.append(f"{shapes}, of different batches")
    if q.shape[3] != k.shape[3]:
        errors.append(f"{shapes}: queries and keys differ in width")
    if k.shape[1:3] != v.shape[1:3]:
        errors.append(f"{shapes}: keys and values differ in length or heads")
    if 0 in (*q.shape, *k.shape, *v.shape):
        errors.append(f"{shapes}, and none may be empty")
    elif q.shape[2] % k.shape[2]:
        errors.append(f"{q.shape[2]} heads of queries are no multiple of {k.shape[2]} of keys")
    return errors


def _mask_errors(mask, scores: tuple[int, ...]) -> list[str]:
    if mask is None:
        return []
    shape = tuple(mask.array.shape if isinstance(mask, UnevenArray) else mask.shape)
    if mask.dtype != bool and not jnp.issubdtype(mask.dtype, jnp.floating):
        return [f"the mask is {mask.dtype}, and needs bool (True is visible) or floats to add"]
    if len(shape) != 4 or any(n not in (1, m) for n, m in zip(shape, scores, strict=False)):
        return [f"the mask is {shape}, which is not {scores} or 1 in places"]
    return []


def _length_errors(lengths: tuple[Any, Any], batch: int) -> list[str]:
    return [
        f"{name}_seq_lengths is {jnp.shape(length)}, and needs one number per sample, ({batch},)"
        for name, length in zip(("query", "key_value"), lengths, strict=True)
        if length is not None and jnp.shape(length) != (batch,)
    ]


def _sizes(verb: str, arrays, mask, blocks: int):
    """The sizes of the blocks of queries and of keys, once it is sure that all agree."""
    sizes_of = [
        _sequence_sizes(f"{verb}: {n}", x, blocks) for n, x in zip("qkv", arrays, strict=True)
    ]
    if sizes_of[1] != sizes_of[2]:
        raise ShardingError(
            f"{verb}: keys are in blocks of {sizes_of[1] or 'one size'}, and values of "
            f"{sizes_of[2] or 'one size'}. Give them the same blocks."
        )
    if mask is not None:
        sizes = mask.sizes if isinstance(mask, UnevenArray) else (None,) * 4
        expected = [
            None if n == 1 else size for n, size in zip(mask.shape[2:], sizes_of, strict=False)
        ]
        if list(sizes[2:]) != expected or any(sizes[:2]):
            raise ShardingError(
                f"{verb}: the mask is in blocks of {sizes}, and queries and keys of "
                f"{sizes_of[0]} and {sizes_of[1]}. Make it an UnevenArray of the same blocks, or "
                "give lengths instead."
            )
    return sizes_of[0], sizes_of[1]


def _sequence_sizes(name: str, x, blocks: int) -> tuple[int, ...] | None:
    if not isinstance(x, UnevenArray):
        if x.shape[1] % blocks:
            raise UnevenError(
                f"{name}: a sequence of {x.shape[1]} does not split over {blocks} devices. Pad it "
                f"to {-(-x.shape[1] // blocks) * blocks} and give query_seq_lengths and "
                "key_value_seq_lengths, or pass an UnevenArray."
            )
        return None
    if any(sizes is not None for axis, sizes in enumerate(x.sizes) if axis != 1):
        raise ShardingError(f"{name}: only the sequence may be uneven, and got {x!r}")
    sizes = x.sizes[1]
    if sizes is not None and len(sizes) != blocks:
        raise ShardingError(
            f"{name}: the sequence has {len(sizes)} blocks, and its mesh axes {blocks} devices. "
            "Give one block per device."
        )
    if sizes is None and x.shape[1] % blocks:
        raise UnevenError(f"{name}: a sequence of {x.shape[1]} does not split over {blocks}")
    return sizes


def _check_sharding(name: str, x, mesh: Mesh, spec: P, open_axes: tuple[int, ...]) -> None:
    """Raise for an array that would have to be gathered first; traced ones are not checked."""
    sharding = sharding_of(x)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return
    target = named_sharding(spec, mesh, 4)
    if not same_grid(sharding.mesh, mesh):
        if not same_layout(sharding, target, 4):
            raise ShardingError(
                f"{name} is sharded as {sharding.spec} on a mesh of "
                f"{describe_mesh(sharding.mesh)}, and required as {target.spec} on one of "
                f"{describe_mesh(mesh)}. Pass that mesh, or iso.reshard it first."
            )
        return
    wants = [axis_names(entry) for entry in entries_of(target.spec)] + [()] * 4
    used = {axis for want in wants for axis in want}
    for axis, entry in enumerate(entries_of(sharding.spec)):
        have, want = axis_names(entry), wants[axis]
        left_to_xla = not want and axis in open_axes and not used & set(have)
        if have and have != want and not left_to_xla:
            raise ShardingError(
                f"{name} is sharded as {sharding.spec}, and required as {target.spec}: axis {axis} "
                "would be gathered. Name the mesh axes that split it, or iso.reshard it first."
            )


def _typed(key) -> jax.Array:
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    return jax.random.wrap_key_data(key)
