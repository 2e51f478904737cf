"""A Fourier transform on the devices of a mesh, partitioned when it is compiled.

A line along an unsplit axis is its device's own: nothing is sent. Along an axis that is split,
devices exchange lines by an all-to-all, so that each has complete lines, transform those,
and exchange them back. Where a device has a slice of a single line, that is gathered. Either way
the result has the operand's sharding; half a spectrum has another size, so the compiler does not
know, and gathers it along its axis unless it is constrained.

>>> import jax
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> x = shard(jnp.ones((8, 6), jnp.complex64), make_mesh((4,), ("x",)), ("x",))
>>> def sent(axis):
...     text = jax.jit(lambda x: split_transform(FourierOp("fft", (axis,)), x)).lower(x).compile()
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

from isoshard.core.kit import Rule, compilation, entries_of, partitioned
from isoshard.core.kit import spec_axis_names as axis_names

_AT_ONCE = 3  # axes that XLA transforms


class FourierOp(NamedTuple):
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


def replicated_transform(op: FourierOp, x: Any) -> Any:
    """The transform of an array that every device has."""
    return _transform(op, x, lax.fft)


def _transform(op: FourierOp, x: Any, fft: Callable[..., Any]) -> Any:
    """The same by `fft`, which transforms the last axes and divides the inverse."""
    axes = op.axes
    while axes:
        some, axes = axes[-_AT_ONCE:], axes[:-_AT_ONCE]
        ends = tuple(range(x.ndim - len(some), x.ndim))
        lengths = tuple(x.shape[axis] for axis in some)
        lengths = (op.length,) if op.kind == "irfft" else lengths
        result = fft(jnp.moveaxis(x, some, ends), op.kind, lengths)
        result = result * math.prod(lengths) if op.kind in ("ifft", "irfft") else result
        x = jnp.moveaxis(result, ends, some)
    return x


def _local_transform(op: FourierOp, x: Any) -> Any:
    """The transform of a device's shard, or of lines that it has received."""
    return _transform(op, x, _in_order)


def _in_order(lines: Any, kind: str, lengths: tuple[int, ...]) -> Any:
    """`lax.fft` of axes in this order in memory.

    XLA's CPU backend (jax 0.10.2) may let the transform have the order that an exchange before or
    after it asks for, and then refuses to run it.
    """
    order = compilation.MEMORY_ORDER.resolve()(tuple(range(lines.ndim)))
    in_order = compilation.IN_MEMORY_ORDER.resolve()
    return in_order(lax.fft(in_order(lines, order), kind, lengths), order)


class _SplitAxis(NamedTuple):
    """Where an axis is split: by which mesh axes, over how many devices, and its true size."""

    axis: int
    names: tuple[str, ...]
    count: int
    size: int


def _split(op: FourierOp, mesh: Mesh, operands: Any, result: Any) -> Any:
    (x,) = operands
    names = _names(op, x, result)
    counts = [math.prod(mesh.shape[name] for name in axes) for axes in names]
    layout = NamedSharding(mesh, P(*(axes or None for axes in names)))
    split_axes = [
        _SplitAxis(axis, names[axis], counts[axis], x.shape[axis])
        for axis in op.axes
        if counts[axis] > 1
    ]
    return mesh, functools.partial(_on_shard, op, split_axes), layout, (layout,)


def _names(op: FourierOp, x: Any, result: Any) -> list[tuple[str, ...]]:
    """The mesh axes that split each axis: the operand's, else those required of the result."""
    names, result_names = _split_names(x), _split_names(result)
    used = {name for axes in names for name in axes}
    for axis, axes in enumerate(result_names):
        if not names[axis] and axis not in op.axes and not used & set(axes):
            names[axis] = axes
            used |= set(axes)
    return names


def _split_names(x: Any) -> list[tuple[str, ...]]:
    names = list(map(axis_names, entries_of(x.sharding.spec)))
    return names + [()] * (len(x.shape) - len(names))


def _on_shard(op: FourierOp, split_axes: list[_SplitAxis], x: Any) -> Any:
    """The transform of one device's shard."""
    split = [split_axis.axis for split_axis in split_axes]
    local_axes = tuple(axis for axis in op.axes if axis not in split)
    x = _local_transform(op._replace(axes=local_axes), x) if local_axes else x
    for split_axis in split_axes:
        x = _lines(op, split_axis, x)
    return x


def _lines(op: FourierOp, split_axis: _SplitAxis, x: Any) -> Any:
    """Transform a shard along an axis that is split."""
    lines = jnp.moveaxis(x, split_axis.axis, -1)
    shape = lines.shape
    lines = lines.reshape(-1, shape[-1])
    run = _exchanged if len(lines) > 1 else _gathered
    lines = run(op._replace(axes=(1,)), split_axis, lines)
    return jnp.moveaxis(lines.reshape(*shape[:-1], -1), -1, split_axis.axis)


def _exchanged(op: FourierOp, split_axis: _SplitAxis, lines: Any) -> Any:
    count = len(lines)
    move = functools.partial(lax.all_to_all, axis_name=split_axis.names, tiled=True)
    lines = _padded(lines, 0, split_axis.count * -(-count // split_axis.count))
    lines = move(lines, split_axis=0, concat_axis=1)[:, : split_axis.size]
    lines = _local_transform(op, lines)
    lines = _padded(lines, 1, split_axis.count * -(-lines.shape[1] // split_axis.count))
    return move(lines, split_axis=1, concat_axis=0)[:count]


def _gathered(op: FourierOp, split_axis: _SplitAxis, lines: Any) -> Any:
    lines = lax.all_gather(lines, split_axis.names, axis=1, tiled=True)[:, : split_axis.size]
    lines = _local_transform(op, lines)
    block = -(-lines.shape[1] // split_axis.count)
    lines = _padded(lines, 1, split_axis.count * block)
    return lax.dynamic_slice_in_dim(lines, lax.axis_index(split_axis.names) * block, block, 1)


def _padded(x: Any, axis: int, size: int) -> Any:
    widths = [(0, size - x.shape[at] if at == axis else 0, 0) for at in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), widths)


def _rule(op: FourierOp, shapes: tuple[tuple[int, ...], ...]) -> Rule:
    """`a0 a1 -> a0 a1`; an axis of another size in the result is another one."""
    (shape,) = shapes
    names = [f"a{axis}" for axis in range(len(shape))]
    pairs = zip(names, shape, op.result(shape), strict=True)
    after = [name if have == want else f"{name}result" for name, have, want in pairs]
    return f"{' '.join(names)} -> {' '.join(after)}", {}


split_transform = partitioned(replicated_transform, _split, _rule)
"""`replicated_transform` as an operator that gets its operand's sharding; it has no gradient."""
