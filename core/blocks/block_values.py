"""Values of a lifted function: arrays of which some axes are in blocks with padding.

A `Value` has a true shape, the one that the function was traced with, and a padded one, that of its
array. Two operands are compatible when each axis has one split in both: `aligned` packs unsplit
axes, repacks those with another split, and never lets one mesh axis split two axes of a result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from .axis_moves import movable, move_axis
from .hints import Hints, first_hints, fitting, sharding_from
from .splits import AxisSplit, constrain, pack_axis, unpack_axis, valid_mask

Splits = tuple[AxisSplit | None, ...]


@dataclasses.dataclass(frozen=True)
class Value:
    """An array inside a lifted function.

    Attributes:
        array: of the padded shape.
        splits: one per axis; None for an axis that is not padded.
        clean: whether the padding is known to be zero.
        fixed: whether it is a constant, to which no gradient flows.
        sliced_from: of an axis that is a slice of one in blocks, the axis and its split.
        hints: one per axis: its sharding if it is in no blocks; None if unknown. Those that
            contradict the splits are dropped.
    """

    array: Any
    splits: Splits
    clean: bool = False
    fixed: bool = False
    sliced_from: tuple[tuple[int, AxisSplit], ...] = ()
    hints: Hints = ()

    def __post_init__(self) -> None:
        """Drop hints that do not fit."""
        hints = fitting(self.hints, self.splits, np.shape(self.array))
        object.__setattr__(self, "hints", hints)

    @property
    def frame(self) -> Frame:
        """Its splits and hints."""
        return Frame(self.splits, self.hints)

    @property
    def shape(self) -> tuple[int, ...]:
        """The true shape."""
        padded = np.shape(self.array)
        pairs = zip(padded, self.splits, strict=True)
        return tuple(have if split is None else split.extent for have, split in pairs)

    @property
    def dtype(self) -> Any:
        """The dtype of the elements; literals of a jaxpr have their own."""
        return jnp.result_type(self.array)

    @property
    def uneven(self) -> bool:
        """Whether an axis is in blocks."""
        return any(split is not None for split in self.splits)

    def with_zeros(self) -> Value:
        """The same with zeros for padding, through which no gradient flows back."""
        return self if self.clean else dataclasses.replace(self.filled(0), clean=True)

    def filled(self, fill: Any, axes: Iterable[int] | None = None) -> Value:
        """The same with `fill` in the padding along some axes, by default along all."""
        mask = valid_mask(self.splits, None if axes is None else tuple(axes))
        if mask is None:
            return self
        array = jnp.where(mask, self.array, jnp.asarray(fill, self.array.dtype))
        return dataclasses.replace(self, array=array, clean=False)

    def unpacked(self, axes: Iterable[int] | None = None) -> Value:
        """The same with some axes, by default all, unpacked."""
        selected = range(len(self.splits)) if axes is None else set(axes)
        array, splits = self.array, list(self.splits)
        for axis, split in enumerate(self.splits):
            if split is not None and axis in selected:
                array, splits[axis] = unpack_axis(array, axis, split), None
        return Value(array, tuple(splits), self.clean, self.fixed, hints=self.hints)

    def packed(self, axis: int, split: AxisSplit) -> Value:
        """The same with one axis in blocks; another that the same mesh axis splits is unpacked."""
        if self.splits[axis] == split:
            return self
        before = self.splits[axis]
        if before is not None and before.extent == split.extent and movable(before, split):
            value, array = self, move_axis(self.array, axis, before, split)
        else:
            value = self._free_for(axis, split)
            array = pack_axis(value.array, axis, split)
        splits = (*value.splits[:axis], split, *value.splits[axis + 1 :])
        clean = self.clean or not any(s for at, s in enumerate(value.splits) if at != axis)
        array = array if self.fixed else constrain(array, splits)
        return Value(array, splits, clean, self.fixed, hints=value.hints)

    def spread(self, axis: int, split: AxisSplit) -> Value:
        """The same with its one element along an axis repeated at the valid positions of blocks."""
        value = self._free_for(axis, split)
        shape = list(value.array.shape)
        shape[axis] = split.padded
        splits = (*value.splits[:axis], split, *value.splits[axis + 1 :])
        array = jnp.broadcast_to(value.array, shape)
        grown = Value(array, splits, False, self.fixed, hints=value.hints)
        return grown if self.fixed else grown.filled(0, [axis])

    def with_splits(self, splits: Sequence[AxisSplit | None]) -> Value:
        """The same with exactly these splits."""
        value = self.unpacked([axis for axis, split in enumerate(splits) if split is None])
        for axis, split in enumerate(splits):
            value = value if split is None else value.packed(axis, split)
        return value

    def hinted(self, hints: Hints) -> Value:
        """The same with other hints, so far as they fit."""
        return dataclasses.replace(self, hints=hints)

    def placed(self) -> Value:
        """The same, constrained to the sharding of its splits and hints."""
        sharding = sharding_from(self.splits, self.hints, P.UNCONSTRAINED)
        if sharding is None:
            return self
        return dataclasses.replace(self, array=lax.with_sharding_constraint(self.array, sharding))

    def _free_for(self, axis: int, split: AxisSplit) -> Value:
        """The same with an axis unpacked, and every other that the mesh axes of `split` divide."""
        rivals = [
            at
            for at, other in enumerate(self.splits)
            if at == axis or (other is not None and set(other.names) & set(split.names))
        ]
        return self.unpacked(rivals)


@dataclasses.dataclass(frozen=True)
class Frame:
    """The layout of a value: its splits and hints.

    Attributes:
        splits: one per axis.
        hints: likewise.
    """

    splits: Splits
    hints: Hints = ()

    def of(self, array: Any, *, clean: bool = False) -> Value:
        """An array of this layout, as a value."""
        return Value(array, self.splits, clean, hints=self.hints)


def as_value(x: Any, *, fixed: bool = False) -> Value:
    """A value that is unsplit along every axis."""
    return Value(x, (None,) * np.ndim(x), True, fixed)


def joint(candidates: Sequence[Iterable[AxisSplit | None]]) -> Splits:
    """The splits of a result: per axis the first there is, no mesh axis used twice."""
    used: set[str] = set()
    splits: list[AxisSplit | None] = []
    for candidate in candidates:
        free = (split for split in candidate if split is not None and not used & set(split.names))
        split = next(free, None)
        used |= set(split.names) if split else set()
        splits.append(split)
    return tuple(splits)


def joint_hints(values: Sequence[Value]) -> Hints:
    """The hints of a result that has the axes of some values: per axis the first there is."""
    rank = max(len(value.splits) for value in values)
    full = [value for value in values if len(value.splits) == rank]
    return first_hints([[value.hints[axis] for value in full] for axis in range(rank)])


def aligned(values: Sequence[Value], *, broadcast: bool = False) -> tuple[list[Value], Splits]:
    """Give values of one rank the same splits along every axis."""
    rank = max(len(value.splits) for value in values)
    full = [value for value in values if len(value.splits) == rank]
    extents = [
        max(_sizes(full, axis)) if 0 not in _sizes(full, axis) else 0 for axis in range(rank)
    ]
    splits = joint(
        [
            [value.splits[axis] for value in full if value.shape[axis] == extents[axis]]
            for axis in range(rank)
        ]
    )
    return [_fit(value, splits, extents, broadcast) for value in values], splits


def _fit(value: Value, splits: Splits, extents: Sequence[int], broadcast: bool) -> Value:
    if not value.splits and splits:  # a scalar
        if value.fixed or not any(splits) or not _flows(value.array):
            return value
        ones = (1,) * len(splits)
        value = Value(jnp.reshape(value.array, ones), (None,) * len(splits), True)
    for axis, split in enumerate(splits):
        if broadcast and value.shape[axis] != extents[axis]:
            value = value.unpacked([axis])
            if split is not None and not value.fixed and _flows(value.array):
                value = value.spread(axis, split)
        elif split is None:
            value = value.unpacked([axis])
        else:
            value = value.packed(axis, split)
    return value


def _sizes(values: Sequence[Value], axis: int) -> list[int]:
    return [value.shape[axis] for value in values]


def _flows(array: Any) -> bool:
    """Whether a gradient may flow to it."""
    return jnp.issubdtype(array.dtype, jnp.inexact)
