"""Figures of a report that its texts and pictures share: sentences, tables, and bars of charts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import Mesh

from isoshard.core.kit import (
    ShardingError,
    count_of,
    human_bytes,
    human_flops,
    human_seconds,
    percent,
)

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
        seconds: of all, if nothing overlaps.
        kinds: the kinds of collectives, those that send most first.
    """

    axes: str
    bytes: int
    seconds: float
    kinds: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Bar:
    """A bar of a chart.

    Attributes:
        start: where it begins on the chart's axis.
        size: its length.
        kind: what its colour means: a role of memory, "compute", "axis0", ..
        text: its size in words.
    """

    start: float
    size: float
    kind: str
    text: str


Row = tuple[str, tuple[Bar, ...]]
"""A row of a chart: label and bars."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
        columns: their names.
        rows: cells of each row.
        rest: the rows that are left out, in words.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    rest: str = ""


def joined(axes: Sequence[str]) -> str:
    """Axes as the keys of `TimeEstimate.collectives` have them."""
    return "+".join(axes)


def axes_text(use: CollectiveUse) -> str:
    """The axes of collectives, and how many slices talk if several do.

    Example:
        >>> axes_text(CollectiveUse("all-reduce", ("replica",), 4, 1, "", slices=32))
        'replica, 32 slices'
    """
    return joined(use.axes) + (f", {use.slices} slices" if use.slices > 1 else "")


def mesh_text(report: Report) -> str:
    """The axes of the mesh and their sizes."""
    return " x ".join(f"{name}={size}" for name, size in report.mesh.items())


def shares(memory: MemoryEstimate) -> list[tuple[str, int]]:
    """The roles that take memory at the peak, with bytes; what is left over as "other"."""
    sizes = [(role, getattr(memory, role)) for role in ROLES]
    rest = memory.peak - sum(size for _, size in sizes)
    return [(role, size) for role, size in [*sizes, ("other", rest)] if size > 0]


def fit_text(report: Report) -> str:
    """Whether the step fits in memory, and by how much."""
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
        f"{report.step} on {report.topology} ({axes}): {fit_text(report)}; "
        f"{human_seconds(time.overlapped)}, {percent(time.utilisation, 1)} utilised, "
        f"limited by {limit(report)}"
    )


def heading(report: Report) -> str:
    """What was estimated: step, machine, mesh and depth."""
    devices = count_of(math.prod(report.mesh.values()), "device")
    return (
        f"{report.step} ({report.framework}) on {report.topology}: {mesh_text(report)}, {devices}, "
        f"depth {report.depth!r}"
    )


def origin(report: Report) -> str:
    """How long the estimate took, and by which versions."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    taken = f"estimated in {human_seconds(report.seconds_taken)}"
    return f"{taken}{' with ' if versions else ''}{versions}"


def limit(report: Report) -> str:
    """What limits a step, in words."""
    texts = {"compute": "compute", "memory": "memory bandwidth"}
    return texts.get(report.time.limit, f"collectives over {report.time.limit}")


def memory_rows(report: Report) -> list[Row]:
    """The chart of a device's memory: roles one after the other, their sum and the capacity."""
    memory, at = report.memory, 0
    rows: list[Row] = []
    for role, size in shares(memory):
        rows.append((role, (Bar(at, size, role, human_bytes(size)),)))
        at += size
    rows.append(("peak", (Bar(0, memory.peak, "peak", human_bytes(memory.peak)),)))
    capacity = human_bytes(memory.capacity)
    rows.append(("capacity", (Bar(0, memory.capacity, "other", capacity),)))
    return rows


def time_rows(report: Report) -> list[Row]:
    """The chart of a step's seconds, by what takes them."""
    time, axes = report.time, list(report.mesh)
    rows = [("computing", time.compute, "compute"), ("memory", time.memory, "inputs")]
    rows.append(("busy", time.busy, "compute"))
    rows += [(use.axes, use.seconds, axis_kind(axes, use.axes)) for use in traffic(report)]
    rows += [("serial", time.serial, "other"), ("overlapped", time.overlapped, "peak")]
    return [
        (name, (Bar(0, seconds, kind, human_seconds(seconds)),)) for name, seconds, kind in rows
    ]


def axis_kind(axes: Sequence[str], name: str) -> str:
    """The kind of bars for collectives along axes.

    Args:
        axes: all axes of the mesh, in order.
        name: the axes of the collectives, joined by "+".
    """
    return f"axis{axes.index(name) % 4}" if name in axes else "axes"


def time_sentences(report: Report) -> list[str]:
    """Operations, bytes, utilisation and assumptions of the seconds of a step."""
    time = report.time
    return [
        f"{human_flops(report.flops)} and {human_bytes(report.bytes_moved)} moved; "
        f"{percent(time.utilisation, 1)} utilised, limited by {limit(report)}",
        *(f"assumed: {text}" for text in (*report.assumptions, *time.assumptions)),
    ]


def live_arrays(report: Report, most: int) -> Table:
    """The largest arrays at the peak."""
    shown, rest = report.memory.largest[:most], report.memory.largest[most:]
    rows = [
        (
            human_bytes(array.bytes),
            array.name,
            f"{array.dtype}[{','.join(map(str, array.shape))}]",
            array.line,
        )
        for array in shown
    ]
    size = human_bytes(sum(array.bytes for array in rest))
    more = f"and {count_of(len(rest), 'smaller array')}: {size}" if rest else ""
    return Table(("bytes", "array", "shape", "line"), tuple(rows), more)


def collectives(report: Report, most: int) -> Table:
    """Collectives by kind, axes and line, those that take most seconds first."""
    by_cost = sorted(report.collectives, key=lambda use: (-use.seconds, -use.bytes * use.count))
    shown, rest = by_cost[:most], by_cost[most:]
    rows = [
        (
            use.kind,
            axes_text(use),
            human_seconds(use.seconds),
            f"{use.count:,}",
            human_bytes(use.bytes),
            use.line,
        )
        for use in shown
    ]
    more = rest and (
        f"and {sum(use.count for use in rest):,} from {count_of(len(rest), 'more line')}: "
        f"{human_seconds(sum(use.seconds for use in rest))}"
    )
    columns = ("kind", "axes", "seconds", "count", "bytes each", "line")
    return Table(columns, tuple(rows), more or "")


def traffic(report: Report) -> list[Traffic]:
    """What is sent along each set of axes, most seconds first."""
    groups: dict[str, list[CollectiveUse]] = {}
    for use in report.collectives:
        groups.setdefault(joined(use.axes), []).append(use)
    uses_of_axes = []
    for axes in dict.fromkeys([*groups, *report.time.collectives]):
        uses = groups.get(axes, [])
        bytes_of: dict[str, int] = {}
        for use in uses:
            bytes_of[use.kind] = bytes_of.get(use.kind, 0) + use.bytes * use.count
        seconds = report.time.collectives.get(axes, math.fsum(use.seconds for use in uses))
        kinds = tuple(sorted(bytes_of, key=lambda kind: -bytes_of[kind]))
        uses_of_axes.append(Traffic(axes, sum(bytes_of.values()), seconds, kinds))
    return sorted(uses_of_axes, key=lambda use: (-use.seconds, -use.bytes, use.axes))


def mesh_lines(report: Report) -> list[str]:
    """For each axis of the mesh its links, and what a step sends along it."""
    uses, mesh = traffic(report), mesh_of(report)
    lines = []
    for name, size in report.mesh.items():
        text = "; ".join(
            f"{human_bytes(use.bytes)} in {human_seconds(use.seconds)} "
            f"({', '.join(use.kinds) or 'collectives'}"
            f"{'' if use.axes == name else f', with {use.axes}'})"
            for use in uses
            if name in use.axes.split("+")
        )
        links = f" ({wiring(mesh, name)})" if mesh is not None and size > 1 else ""
        lines.append(f"{name}={size}{links}: {text or 'nothing'}")
    return lines


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


def slices(report: Report) -> np.ndarray[Any, Any]:
    """The last two axes of the mesh as a grid, with the group of fast links of each device.

    Returns:
        Ids of slices where links span a torus, else of the devices that a switch joins; all 0 if
        the machine is not in the table here.
    """
    sizes = (1, 1, *report.mesh.values())[-2:]
    mesh = mesh_of(report)
    if mesh is None:
        return np.zeros(sizes, int)
    ids = np.array([device.slice_index for device in mesh.devices.flat])
    return ids.reshape(-1, *sizes)[0]


def wiring(mesh: Mesh, axes: str) -> str:
    """The links along axes, in words.

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
