"""Padding and rolling axes that are split, into shards of any sizes.

>>> import jax.numpy as jnp
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> rows = shard(jnp.arange(8), make_mesh((4,), ("x",)), ("x",))
>>> pad(rows, {0: (2, 2)}, "reflect").tolist()
[2, 1, 0, 1, 2, 3, 4, 5, 6, 7, 6, 5]
>>> pad(rows, {0: (0, 1)}, value=9).sizes                     # where they were, and one more
((2, 2, 2, 3),)
>>> roll(rows, 3, 0).tolist()
[5, 6, 7, 0, 1, 2, 3, 4]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax

from isoshard.core.kit import MODES, any_framework, layout_of, lifted

from .reach import Operator, View
from .window_arguments import ArgumentErrors, is_integer
from .window_operators import apply_or_record

Widths = Mapping[int, tuple[int, int]] | Sequence[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class ShiftReach:
    """Output o is row `o - before`; `rolled` keeps output o with row o."""

    before: int
    after: int
    rolled: bool = False
    native = False

    def outputs(self, rows: int) -> int:
        """The padded size."""
        return rows + self.before + self.after

    def reads(self, o: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """One row."""
        return o - self.before, o - self.before + 1

    def home(self, o: np.ndarray, rows: int) -> np.ndarray:
        """That row."""
        return o if self.rolled else o - self.before

    def tables(self, o: np.ndarray, rows: int) -> tuple[np.ndarray, ...]:
        """None are needed."""
        return ()


@dataclasses.dataclass(frozen=True)
class _Keep:
    """The window itself, with padding around it."""

    axes: tuple[int, ...]
    value: float

    def __call__(self, window: Any, views: tuple[View, ...]) -> Any:
        """Pad the axes that are not split."""
        pads = [(0, 0, 0)] * window.ndim
        for axis, view in zip(self.axes, views, strict=True):
            pads[axis] = (*view.pads, 0)
        return lax.pad(window, np.array(self.value, window.dtype), pads)


@any_framework
def pad(
    x: Any,
    widths: Widths,
    mode: str = "zero",
    *,
    value: float = 0,
    mesh: Any = None,
    spec: Any = None,
) -> Any:
    """Add rows on either side of axes, or take some away.

    Args:
        x: a jax.Array or UnevenArray.
        widths: rows before and after, a pair for each axis or a mapping of axes to pairs; negative
            numbers take rows away.
        mode: the values of new rows: "zero" (which is `value`), "wrap", "edge", "reflect" or
            "symmetric", as in `np.pad`.
        value: for mode "zero".
        mesh: with `spec`, the sharding of `x`; needed inside `jax.jit`, on Auto axes.
        spec: any spelling of a spec.

    Returns:
        The padded array, sharded as `x`. If its axes divide and `x` was no UnevenArray, its shards
        are equal; else each row remains on its device, and new ones join the nearest.

    Raises:
        ShardingError: an argument, or the sharding, does not fit.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> from isoshard.core.transfer.device_put import shard
        >>> rows = shard(np.arange(4), make_mesh((4,), ("x",)), ("x",))
        >>> pad(rows, [(1, 3)], "edge").tolist()
        [0, 0, 1, 2, 3, 3, 3, 3]
    """
    errors = ArgumentErrors("pad")
    ndim = len(x.shape)
    errors.choice("mode", mode, MODES)
    by_axis = widths if isinstance(widths, Mapping) else dict(enumerate(widths))
    pairs: dict[int, tuple[int, int]] = {}
    for axis, pair in by_axis.items():
        if not (is_integer(axis) and -ndim <= axis < ndim):
            errors.require(False, f"axis {axis!r} is none of the {ndim} axes")
        elif not (isinstance(pair, Sequence) and len(pair) == 2 and all(map(is_integer, pair))):
            errors.require(False, f"widths {pair!r} of axis {axis} are no two integers")
        elif tuple(pair) != (0, 0):
            pairs[axis % ndim] = (int(pair[0]), int(pair[1]))
    errors.raise_any()
    if not pairs:
        if not lifted(x, mesh, spec):
            layout_of(x, mesh, spec, verb="pad")  # raises if it has no sharding
        return x
    reaches = tuple((axis, ShiftReach(*pairs[axis])) for axis in sorted(pairs))
    local = _Keep(tuple(sorted(pairs)), value)
    return apply_or_record(Operator("pad", reaches, local, mode, value), x, mesh, spec)


@any_framework
def roll(x: Any, shift: int, axis: int, *, mesh: Any = None, spec: Any = None) -> Any:
    """Move rows along an axis, and those that fall off to the other end; as `np.roll`.

    Args:
        x: a jax.Array or UnevenArray.
        shift: by how many rows; may be negative.
        axis: along which axis.
        mesh: with `spec`, the sharding of `x`; needed inside `jax.jit`, on Auto axes.
        spec: any spelling of a spec.

    Returns:
        The rolled array, in shards of the same sizes.

    Raises:
        ShardingError: an argument, or the sharding, does not fit.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> from isoshard.core.transfer.device_put import shard
        >>> roll(shard(np.arange(4), make_mesh((4,), ("x",)), ("x",)), -1, 0).tolist()
        [1, 2, 3, 0]
    """
    errors = ArgumentErrors("roll")
    ndim = len(x.shape)
    errors.require(is_integer(shift), f"shift {shift!r} is no integer")
    inside = is_integer(axis) and -ndim <= axis < ndim
    errors.require(inside, f"axis {axis!r} is none of the {ndim} axes")
    errors.raise_any()
    axis %= ndim
    shift %= max(x.shape[axis], 1)
    reaches = ((axis, ShiftReach(shift, -shift, rolled=True)),)
    return apply_or_record(Operator("roll", reaches, _Keep((axis,), 0), "wrap"), x, mesh, spec)
