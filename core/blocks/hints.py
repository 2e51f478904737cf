"""Hints: the known sharding of axes that are in no blocks.

An even axis that mesh axes split needs no padding, and XLA shards it. With a hint,
operators that exchange rows along another axis leave it sharded; else XLA may gather it. A hint
changes no value, only placement: rules propagate it where an axis is unchanged, and drop
it elsewhere.

>>> from isoshard.core.layout.mesh import make_mesh
>>> batch = Even(("data",), make_mesh((2, 4), ("data", "x")))
>>> batch.shards
2
>>> first_hints([[None, batch], []])[0] is batch
True
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterable, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.axis_types import auto
from isoshard.core.layout.spec import axis_names

from .splits import AxisSplit


@dataclasses.dataclass(frozen=True)
class Even:
    """The sharding of an axis that is in no blocks.

    Attributes:
        names: the mesh axes that split it, outermost first; at least one.
        mesh: the mesh they belong to.
    """

    names: tuple[str, ...]
    mesh: Mesh

    @property
    def shards(self) -> int:
        """Into how many shards it is split."""
        return math.prod(self.mesh.shape[name] for name in self.names)


Hints = tuple[Even | None, ...]  # one entry per axis; None where it is unknown


def hints_of(layout: Any, rank: int) -> Hints:
    """The hint of each axis of a sharding.

    Example:
        >>> hints_of(None, 2)
        (None, None)
    """
    if not isinstance(layout, NamedSharding):
        return (None,) * rank
    mesh = auto(layout.mesh)
    entries = (*layout.spec, *[None] * (rank - len(layout.spec)))
    return tuple(Even(names, mesh) if (names := axis_names(entry)) else None for entry in entries)


def first_hints(candidates: Sequence[Iterable[Even | None]]) -> Hints:
    """Per axis the first hint."""
    return tuple(next((hint for hint in axis_hints if hint), None) for axis_hints in candidates)


def but(hints: Hints, axes: Container[int]) -> Hints:
    """The hints without those of some axes."""
    return tuple(None if axis in axes else hint for axis, hint in enumerate(hints))


def fitting(hints: Hints, splits: Sequence[AxisSplit | None], shape: Sequence[int]) -> Hints:
    """The hints that contradict neither the splits nor each other."""
    if not any(hints):
        return (None,) * len(splits)
    taken = {name for split in splits if split is not None for name in split.names}
    meshes = [split.mesh for split in splits if split is not None and split.mesh is not None]
    result: list[Even | None] = [None] * len(splits)
    for axis, hint in enumerate(hints):
        if hint is None or splits[axis] is not None or taken & set(hint.names):
            continue
        if any(mesh != hint.mesh for mesh in meshes) or shape[axis] % hint.shards:
            continue
        result[axis] = hint
        taken |= set(hint.names)
        meshes.append(hint.mesh)
    return tuple(result)


def sharding_from(
    splits: Sequence[AxisSplit | None], hints: Hints, unknown: Any
) -> NamedSharding | None:
    """The sharding of splits and hints."""
    pairs = zip(splits, hints, strict=True)
    axes = [split if split is not None and split.names else hint for split, hint in pairs]
    mesh = next((axis.mesh for axis in axes if axis is not None and axis.mesh is not None), None)
    if mesh is None:
        return None
    return NamedSharding(mesh, P(*(unknown if axis is None else axis.names for axis in axes)))
