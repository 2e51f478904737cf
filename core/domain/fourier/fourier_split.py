"""A Fourier transform on the devices of a mesh, once the compiler has laid its operand out.

A line along a whole axis is its device's own: nothing is sent. Along an axis that is split, devices
exchange lines by an all-to-all, so that each has its share of them whole, transform those, and
exchange them back. Where a device has a slice of a single line, that is gathered. Either way the
result has the operand's layout; half a spectrum has another size, so the compiler does not know,
and gathers it along its axis unless it is constrained.

>>> import jax
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> x = shard(jnp.ones((8, 6), jnp.complex64), make_mesh((4,), ("x",)), ("x",))
>>> def sent(axis):
...     text = jax.jit(lambda x: split_transform(Along("fft", (axis,)), x)).lower(x).compile()
...     return [kind for kind in ("all-gather", "all-to-all") if f" {kind}(" in text.as_text()]
>>> sent(1), sent(0)
([], ['all-to-all'])
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.custom_partitioning import Rule, partitioned
from isoshard.core.layout.spec import axis_names
from isoshard.core.layout.spec_entries import entries_of
from isoshard.core.runtime._jax_internals import compilation

_AT_ONCE = 3  # axes that XLA transforms


class Along(NamedTuple):
    """A transform that divides by nothing.

    Attributes:
        kind: "fft", "ifft", "rfft" or "irfft".
        axes: along which; one for the last two kinds.
        length: elements of the result along the axis of "irfft".
    """

    kind: str
    axes: tuple[int, ...]
    length: int = 0

    def result(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the result for an operand of `shape`."""
        if self.kind in ("fft", "ifft"):
            return shape
        (axis,) = self.axes
        length = self.length if self.kind == "irfft" else shape[axis] // 2 + 1
        return (*shape[:axis], length, *shape[axis + 1 :])


def whole_transform(along: Along, x: Any) -> Any:
    """The transform of an array that every device has.

    Args:
        along: which.
        x: real for "rfft", otherwise complex.

    Returns:
        real for "irfft", otherwise complex; not divided.
    """
    return _transform(along, x, lax.fft)


def _transform(along: Along, x: Any, fft: Callable[..., Any]) -> Any:
    """The same by `fft`, which transforms the last axes and divides the inverse."""
    axes = along.axes
    while axes:
        some, axes = axes[-_AT_ONCE:], axes[:-_AT_ONCE]
        ends = tuple(range(x.ndim - len(some), x.ndim))
        lengths = tuple(x.shape[axis] for axis in some)
        lengths = (along.length,) if along.kind == "irfft" else lengths
        found = fft(jnp.moveaxis(x, some, ends), along.kind, lengths)
        found = found * math.prod(lengths) if along.kind in ("ifft", "irfft") else found
        x = jnp.moveaxis(found, ends, some)
    return x


def _here_transform(along: Along, x: Any) -> Any:
    """The transform of a device's shard, or of lines that it has received."""
    return _transform(along, x, _in_order)


def _in_order(lines: Any, kind: str, lengths: tuple[int, ...]) -> Any:
    """`lax.fft` of axes in this order in memory.

    XLA's CPU backend (jax 0.10.2) may let the transform have the order that an exchange before or
    after it asks for, and then refuses to run it.
    """
    order = compilation.MEMORY_ORDER.found()(tuple(range(lines.ndim)))
    in_order = compilation.IN_MEMORY_ORDER.found()
    return in_order(lax.fft(in_order(lines, order), kind, lengths), order)


class _Places(NamedTuple):
    """Where an axis is split: by which mesh axes, over how many devices, and its true size."""

    axis: int
    names: tuple[str, ...]
    count: int
    size: int


def _split(along: Along, mesh: Mesh, operands: Any, result: Any) -> Any:
    (x,) = operands
    names = _names(along, x, result)
    counts = [math.prod(mesh.shape[name] for name in own) for own in names]
    layout = NamedSharding(mesh, P(*(own or None for own in names)))
    places = [
        _Places(axis, names[axis], counts[axis], x.shape[axis])
        for axis in along.axes
        if counts[axis] > 1
    ]
    return mesh, functools.partial(_here, along, places), layout, (layout,)


def _names(along: Along, x: Any, result: Any) -> list[tuple[str, ...]]:
    """The mesh axes that split each axis: the operand's, and else those wanted of the result."""
    names, wanted = _of(x), _of(result)
    used = {name for own in names for name in own}
    for axis, own in enumerate(wanted):
        if not names[axis] and axis not in along.axes and not used & set(own):
            names[axis] = own
            used |= set(own)
    return names


def _of(x: Any) -> list[tuple[str, ...]]:
    names = list(map(axis_names, entries_of(x.sharding.spec)))
    return names + [()] * (len(x.shape) - len(names))


def _here(along: Along, places: list[_Places], x: Any) -> Any:
    """What one device does with its shard."""
    split = [place.axis for place in places]
    mine = tuple(axis for axis in along.axes if axis not in split)
    x = _here_transform(along._replace(axes=mine), x) if mine else x
    for place in places:
        x = _lines(along, place, x)
    return x


def _lines(along: Along, place: _Places, x: Any) -> Any:
    """Transform a shard along an axis that is split."""
    lines = jnp.moveaxis(x, place.axis, -1)
    shape = lines.shape
    lines = lines.reshape(-1, shape[-1])
    run = _exchanged if len(lines) > 1 else _gathered
    lines = run(along._replace(axes=(1,)), place, lines)
    return jnp.moveaxis(lines.reshape(*shape[:-1], -1), -1, place.axis)


def _exchanged(along: Along, place: _Places, lines: Any) -> Any:
    count = len(lines)
    move = functools.partial(lax.all_to_all, axis_name=place.names, tiled=True)
    lines = _padded(lines, 0, place.count * -(-count // place.count))
    lines = move(lines, split_axis=0, concat_axis=1)[:, : place.size]
    lines = _here_transform(along, lines)
    lines = _padded(lines, 1, place.count * -(-lines.shape[1] // place.count))
    return move(lines, split_axis=1, concat_axis=0)[:count]


def _gathered(along: Along, place: _Places, lines: Any) -> Any:
    lines = lax.all_gather(lines, place.names, axis=1, tiled=True)[:, : place.size]
    lines = _here_transform(along, lines)
    block = -(-lines.shape[1] // place.count)
    lines = _padded(lines, 1, place.count * block)
    return lax.dynamic_slice_in_dim(lines, lax.axis_index(place.names) * block, block, 1)


def _padded(x: Any, axis: int, size: int) -> Any:
    widths = [(0, size - x.shape[at] if at == axis else 0, 0) for at in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), widths)


def _rule(along: Along, shapes: tuple[tuple[int, ...], ...]) -> Rule:
    """`a0 a1 -> a0 a1`; an axis of another size in the result is another one."""
    (shape,) = shapes
    names = [f"a{axis}" for axis in range(len(shape))]
    pairs = zip(names, shape, along.result(shape), strict=True)
    after = [name if have == want else f"{name}result" for name, have, want in pairs]
    return f"{' '.join(names)} -> {' '.join(after)}", {}


split_transform = partitioned(whole_transform, _split, _rule)
"""`whole_transform` as an operator that gets its operand's layout; it has no gradient."""
