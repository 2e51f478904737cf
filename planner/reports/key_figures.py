"""Figures that texts and pictures of a report show, taken from it in one place."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import Mesh

from isoshard.core.kit import ShardingError, human_bytes, human_seconds, percent

from ..machine.links import links_of
from ..machine.topologies import topology
from .findings import CollectiveUse, MemoryEstimate

if TYPE_CHECKING:
    from .report import Report


ROLES = ("parameters", "buffers", "optimizer", "inputs", "activations")
"""The fields of a `MemoryEstimate` that are bytes of one role, in the order of pictures."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What devices send along the same axes in one step.

    Attributes:
        axes: their names, joined by "+".
        bytes: of all results on one device.
        count: of collectives.
        seconds: of all, if nothing overlaps.
        kinds: the kinds of collectives, those that send most first.
    """

    axes: str
    bytes: int
    count: int
    seconds: float
    kinds: tuple[str, ...]


def joined(axes: Sequence[str]) -> str:
    """Axes as the keys of `TimeEstimate.collectives` have them."""
    return "+".join(axes)


def along(use: CollectiveUse) -> str:
    """The axes of collectives, and how many slices talk if several do.

    Example:
        >>> along(CollectiveUse("all-reduce", ("replica",), 4, 1, "", slices=32))
        'replica, 32 slices'
    """
    return joined(use.axes) + (f", {use.slices} slices" if use.slices > 1 else "")


def shares(memory: MemoryEstimate) -> list[tuple[str, int]]:
    """The roles that take memory at the peak, with bytes; what is left over as "other"."""
    result = [(role, getattr(memory, role)) for role in ROLES]
    rest = memory.peak - sum(size for _, size in result)
    return [(role, size) for role, size in [*result, ("other", rest)] if size > 0]


def verdict(report: Report) -> str:
    """Whether it fits, and by how much."""
    memory = report.memory
    used = percent(memory.peak, memory.capacity)
    if memory.fits:
        return f"fits, {human_bytes(memory.peak)} of {human_bytes(memory.capacity)} ({used})"
    over = human_bytes(memory.peak - memory.capacity)
    return (
        f"does not fit, {human_bytes(memory.peak)} is {over} over the "
        f"{human_bytes(memory.capacity)} of a device ({used})"
    )


def summary(report: Report) -> str:
    """A report in one line."""
    axes = ", ".join(f"{name}={size}" for name, size in report.mesh.items())
    time = report.time
    return (
        f"{report.step} on {report.topology} ({axes}): {verdict(report)}; "
        f"{human_seconds(time.overlapped)}, {percent(time.utilisation, 1)} utilised, "
        f"limited by {limit(report)}"
    )


def limit(report: Report) -> str:
    """What limits a step, in words."""
    words_of_limit = {"compute": "compute", "memory": "memory bandwidth"}
    return words_of_limit.get(report.time.limit, f"collectives over {report.time.limit}")


def by_cost(collectives: Sequence[CollectiveUse]) -> list[CollectiveUse]:
    """Collectives in the order of their seconds, then of their bytes."""
    return sorted(collectives, key=lambda use: (-use.seconds, -use.bytes * use.count))


def traffic(report: Report) -> list[Traffic]:
    """What is sent along each set of axes, most seconds first."""
    groups: dict[str, list[CollectiveUse]] = {}
    for use in report.collectives:
        groups.setdefault(joined(use.axes), []).append(use)
    result = []
    for axes in dict.fromkeys([*groups, *report.time.collectives]):
        uses = groups.get(axes, [])
        sent: dict[str, int] = {}
        for use in uses:
            sent[use.kind] = sent.get(use.kind, 0) + use.bytes * use.count
        count = sum(use.count for use in uses)
        seconds = report.time.collectives.get(axes, math.fsum(use.seconds for use in uses))
        kinds = tuple(sorted(sent, key=lambda kind: -sent[kind]))
        result.append(Traffic(axes, sum(sent.values()), count, seconds, kinds))
    return sorted(result, key=lambda one: (-one.seconds, -one.bytes, one.axes))


def mesh_of(report: Report) -> Mesh | None:
    """The mesh of a report, over described devices.

    Returns:
        The mesh as `Topology.mesh` makes it; None if its chip is not in the table here.
    """
    if not report.mesh:
        return None
    try:
        return topology(report.topology).mesh(tuple(report.mesh.values()), tuple(report.mesh))
    except ShardingError:
        return None


def borders(mesh: Mesh) -> np.ndarray[Any, Any]:
    """For each device of a mesh the number of what it shares fast links with.

    Returns:
        Numbers in the shape of the mesh: of slices where links span a torus, else of what one
        switch joins.
    """
    indices = [device.slice_index for device in mesh.devices.flat]
    return np.array(indices).reshape(mesh.devices.shape)


def wiring(mesh: Mesh, axes: str) -> str:
    """What axes run on, in words.

    Example:
        >>> wiring(topology("h100:2x8").mesh((4, 4), ("data", "model")), "data")
        'nvlink of 2, 450 GB/s; network of 2, 50 GB/s'
    """
    links = links_of(mesh, axes.split("+"))
    return "; ".join(
        "the host's memory"  # its speed is measured where an estimate is made
        if level.kind == "memory"
        else f"{level.kind} of {level.size}, {level.bandwidth / 1e9:.3g} GB/s"
        for level in links.levels
    )
