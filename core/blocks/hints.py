"""Hints: the layout of the axes that are in no blocks, so far as it is known.

An even axis that mesh axes split needs no padding, and XLA lays it out by itself. Knowing that,
operators that exchange rows along another axis leave it where it is; else XLA may gather it. A hint
changes no number, only where things are: rules pass it on where an axis stays as it was, and lose
it elsewhere.

>>> from isoshard.core.layout.mesh import make_mesh
>>> batch = Even(("data",), make_mesh((2, 4), ("data", "x")))
>>> batch.parts
2
>>> first_known([[None, batch], []])[0] is batch
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
    """The layout of an axis that is in no blocks.

    Attributes:
        names: the mesh axes that split it, outermost first; at least one.
        mesh: the mesh they belong to.
    """

    names: tuple[str, ...]
    mesh: Mesh

    @property
    def parts(self) -> int:
        """Into how many shards it is split."""
        return math.prod(self.mesh.shape[name] for name in self.names)


Hints = tuple[Even | None, ...]  # one entry per axis; None where nothing is known


def hints_of(layout: Any, rank: int) -> Hints:
    """The hint of each axis in a layout.

    Example:
        >>> hints_of(None, 2)
        (None, None)
    """
    if not isinstance(layout, NamedSharding):
        return (None,) * rank
    mesh = auto(layout.mesh)
    entries = (*layout.spec, *[None] * (rank - len(layout.spec)))
    return tuple(Even(names, mesh) if (names := axis_names(entry)) else None for entry in entries)


def first_known(candidates: Sequence[Iterable[Even | None]]) -> Hints:
    """Per axis the first hint that there is."""
    return tuple(next((hint for hint in found if hint), None) for found in candidates)


def but(hints: Hints, axes: Container[int]) -> Hints:
    """The hints without those of some axes."""
    return tuple(None if axis in axes else hint for axis, hint in enumerate(hints))


def fitting(hints: Hints, splits: Sequence[AxisSplit | None], shape: Sequence[int]) -> Hints:
    """The hints that contradict neither the splits nor each other."""
    if not any(hints):
        return (None,) * len(splits)
    taken = {name for split in splits if split is not None for name in split.names}
    meshes = [split.mesh for split in splits if split is not None and split.mesh is not None]
    kept: list[Even | None] = [None] * len(splits)
    for axis, hint in enumerate(hints):
        if hint is None or splits[axis] is not None or taken & set(hint.names):
            continue
        if any(mesh != hint.mesh for mesh in meshes) or shape[axis] % hint.parts:
            continue
        kept[axis] = hint
        taken |= set(hint.names)
        meshes.append(hint.mesh)
    return tuple(kept)


def layout_told(
    splits: Sequence[AxisSplit | None], hints: Hints, unknown: Any
) -> NamedSharding | None:
    """The layout of splits and hints."""
    pairs = zip(splits, hints, strict=True)
    told = [split if split is not None and split.names else hint for split, hint in pairs]
    mesh = next((lies.mesh for lies in told if lies is not None and lies.mesh is not None), None)
    if mesh is None:
        return None
    return NamedSharding(mesh, P(*(unknown if lies is None else lies.names for lies in told)))
