"""Sizes: how many elements each block of an axis has, and whether that fits.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.layout.spec import named_sharding
>>> rows = named_sharding(("x", None), make_mesh((4,), ("x",)), 2)
>>> split, unsplit = plan_splits((18, 3), rows, (5, 2, 7, 4))
>>> split.sizes, split.block, split.names, unsplit
((5, 2, 7, 4), 7, ('x',), None)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from isoshard.core.errors import UnevenError
from isoshard.core.layout.axis_types import auto
from isoshard.core.layout.spec import axis_names

from .block_values import Splits
from .splits import AxisSplit

SizesLike = Any
"""None, one tuple of sizes, one entry per axis, or a mapping from axis to sizes."""


def plan_splits(
    shape: Sequence[int], sharding: NamedSharding, sizes: SizesLike, *, name: str = "array"
) -> Splits:
    """The blocks of each axis.

    Args:
        shape: true shape of the array.
        sharding: of it; axes need not divide.
        sizes: how many elements each block has, where only one axis is split; or per axis None or
            that; or a mapping from axes. None is as `torch.chunk`.
        name: of the array, for messages.

    Raises:
        UnevenError: sizes do not sum to an axis, are not one per block, or are of an axis that is
            not split; all errors in one message.
    """
    mesh = auto(sharding.mesh)
    names = [axis_names(entry) for entry in sharding.spec]
    names += [()] * (len(shape) - len(names))
    counts = [math.prod(mesh.shape[axis] for axis in axes) for axes in names]
    by_axis, errors = _per_axis(sizes, shape, counts)
    splits: list[AxisSplit | None] = []
    for axis, (extent, count) in enumerate(zip(shape, counts, strict=True)):
        axis_sizes = by_axis.get(axis)
        if axis_sizes is None:
            axis_sizes = chunk_sizes(extent, count)
        else:
            errors += _size_errors(axis, extent, count, axis_sizes)
        block = max(axis_sizes, default=0)
        same = all(size == block for size in axis_sizes)
        splits.append(None if same else AxisSplit(axis_sizes, block, names[axis], mesh))
    if errors:
        like = next((a for a, count in enumerate(counts) if count > 1), 0)
        hint = f": {chunk_sizes(shape[like], counts[like])}" if shape else ""
        raise UnevenError(
            f"{name}: sizes do not fit shape {tuple(shape)} by {sharding.spec}: "
            f"{'; '.join(errors)}. Give one size per block, which together make the axis, as "
            f"torch.chunk{hint}."
        )
    return tuple(splits)


def chunk_sizes(extent: int, count: int) -> tuple[int, ...]:
    """The sizes that `torch.chunk` gives, empty chunks included.

    Example:
        >>> chunk_sizes(18, 4), chunk_sizes(5, 4)
        ((5, 5, 5, 3), (2, 2, 1, 0))
    """
    step = -(-extent // count)
    return tuple(min(step, max(extent - step * at, 0)) for at in range(count))


def _per_axis(
    sizes: SizesLike, shape: Sequence[int], counts: Sequence[int]
) -> tuple[dict[int, tuple[int, ...]], list[str]]:
    """Sizes by axis, and the errors of their form."""
    if sizes is None:
        return {}, []
    if isinstance(sizes, Mapping):
        pairs = list(sizes.items())
        errors = [f"there is no axis {a}" for a, _ in pairs if not -len(shape) <= a < len(shape)]
        pairs = [
            (a % len(shape), axis_sizes) for a, axis_sizes in pairs if -len(shape) <= a < len(shape)
        ]
    elif all(isinstance(size, int | np.integer) for size in sizes):
        split = [axis for axis, count in enumerate(counts) if count > 1]
        if len(split) != 1:
            return {}, [f"{len(split)} axes are split, so sizes {tuple(sizes)} may be of any"]
        pairs, errors = [(split[0], sizes)], []
    elif len(sizes) != len(shape):
        return {}, [f"{len(sizes)} entries for {len(shape)} axes"]
    else:
        pairs, errors = list(enumerate(sizes)), []
    return {
        axis: tuple(map(int, axis_sizes)) for axis, axis_sizes in pairs if axis_sizes is not None
    }, errors


def _size_errors(axis: int, extent: int, count: int, sizes: tuple[int, ...]) -> list[str]:
    errors = []
    if count == 1 and len(sizes) != 1:
        errors.append(f"axis {axis} is given sizes, and no mesh axis splits it")
    elif len(sizes) != count:
        errors.append(f"axis {axis} is given {len(sizes)} sizes for its {count} blocks")
    if sum(sizes) != extent:
        errors.append(f"axis {axis} is given {sum(sizes)} elements, and has {extent}")
    if any(size < 0 for size in sizes):
        errors.append(f"axis {axis} is given sizes below 0")
    return errors
