"""Seconds of a step by a roofline: the larger of computing and moving bytes, and the collectives.

An operation computes at its dtype's rate and moves its bytes at the memory's, both at once, and
takes the longer of the two. Collectives take the seconds of `collective_times`. There are two sums.
`serial`: everything one after the other. `overlapped`: within a loop (a scope) collectives overlap
with computing, since those of one iteration can start while the one before computes. Exposed are
those of its first iteration, those that wait for what the iteration itself computes
(`DeviceOp.waits`), and all outside of loops. The time of a real program is between the two.

A timeline of many events is shortened for pictures: first neighbours, then stretches of it.

>>> many = [TimelineEvent("compute", (), float(at), 1.0, at, "a.py:1 (f)") for at in range(1000)]
>>> [(event.seconds, event.memory) for event in grouped(many)]
[(1000.0, 999)]

>>> from isoshard.planner.machine.topologies import topology
>>> mesh = topology("v5e:4x4").mesh((4, 4), ("data", "model"))
>>> from isoshard.planner.reports.report import MemoryEstimate
>>> none = MemoryEstimate(0, 0, 0, 0, 0, 0, "", (), 0)
>>> product = DeviceOp("dot_general", "a.py:1 (f)", 1e12, 1e9, "bfloat16", times=4, scope=1)
>>> gather = DeviceOp("all-gather", "a.py:1 (f)", times=4, axes=("model",), sent=10**8, scope=1)
>>> time, timeline = time_of(DeviceProgram((gather, product), none), mesh)
>>> time.limit, time.serial > time.overlapped > time.busy
('compute', True)
>>> [event.what for event in timeline]
['all-gather', 'compute']
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from jax.sharding import Mesh

from ..machine.chips import Chip
from ..machine.topologies import topology_of
from ..reports.report import TimeEstimate, TimelineEvent
from . import collective_times
from .device_program import DeviceOp, DeviceProgram

COMPUTE_REACH = {"tpu": 0.95, "gpu": 0.75, "cpu": 1.0}
"""The share of the peak that large matrix products reach, by platform. TPU: MaxText's 32B step on
v5e runs at 0.67 of the peak and computes a third more than that counts, so its products reach over
0.89. GPU: an assumption, without a source. A CPU's rate is measured."""

MEMORY_REACH = {"tpu": 0.9, "gpu": 0.9, "cpu": 1.0}
"""The share of the memory's bandwidth that large operations reach: the scaling book measures 3.84
of 4.1 ms on an H100. A CPU's rate is measured."""


@dataclasses.dataclass(frozen=True)
class OpTime:
    """Seconds of one run of an operation.

    Attributes:
        compute: floating-point operations.
        memory: bytes between memory and cores.
        collective: of a collective, all of it.
        busy: computing and moving bytes.
    """

    compute: float = 0.0
    memory: float = 0.0
    collective: float = 0.0
    busy: float = 0.0

    @property
    def seconds(self) -> float:
        """Their sum."""
        return self.busy + self.collective


def busy_seconds(compute: float, memory: float, platform: str) -> float:
    """Seconds that an operation computes or moves bytes: the longer of both; on a CPU their sum.

    A core copies blocks of a product's operands before it multiplies them, by the same execution
    units; accelerators have engines that fetch meanwhile.

    Args:
        compute: seconds of its floating-point operations.
        memory: seconds of its bytes.
        platform: of the chip.
    """
    return compute + memory if platform == "cpu" else max(compute, memory)


def overlaps(chip: Chip) -> bool:
    """Whether collectives can overlap with computing: not where the cores do both."""
    return chip.platform != "cpu"


def new_memory_seconds(nbytes: float, chip: Chip) -> float:
    """Seconds to allocate a step's temporaries: of virtual devices, above a size."""
    return nbytes / chip.fresh if chip.fresh and nbytes > chip.kept else 0.0


def op_time(op: DeviceOp, mesh: Mesh, chip: Chip | None = None) -> OpTime:
    """Seconds of one run of an operation.

    Raises:
        ShardingError: it is a collective that is not supported, or of unknown axes.
    """
    chip = chip or topology_of(mesh).chip
    turns = op.reordered if chip.reordered else 0.0
    turned = turns / chip.reordered if turns else 0.0
    if op.is_collective:
        seconds = collective_times.seconds(op.name, op.sent, op.axes, mesh)
        return OpTime(collective=seconds + turned)
    rate = chip.rate(op.dtype) * COMPUTE_REACH.get(chip.platform, 1.0)
    straight = chip.bandwidth * MEMORY_REACH[chip.platform]
    compute, memory = op.flops / rate, (op.bytes - turns) / straight + turned
    memory += op.fresh / chip.fresh if op.fresh else 0.0
    return OpTime(compute, memory, busy=busy_seconds(compute, memory, chip.platform))


def time_of(program: DeviceProgram, mesh: Mesh) -> tuple[TimeEstimate, tuple[TimelineEvent, ...]]:
    """Estimate the seconds of a step.

    Returns:
        The estimate, and the step in order, without overlap, in at most 200 events.

    Raises:
        ShardingError: it has a collective that is not supported, or of unknown axes.
    """
    chip = topology_of(mesh).chip
    ops = (*_first_touched(program, chip), *program.ops)
    times = _waited(ops, [op_time(op, mesh, chip) for op in ops], mesh, chip)
    compute = sum(op.times * time.compute for op, time in zip(ops, times, strict=True))
    memory = sum(op.times * time.memory for op, time in zip(ops, times, strict=True))
    busy = sum(op.times * time.busy for op, time in zip(ops, times, strict=True))
    collectives: defaultdict[str, float] = defaultdict(float)
    for op, time in zip(ops, times, strict=True):
        if op.is_collective:
            ordered = [name for name in mesh.axis_names if name in op.axes]
            collectives["+".join(ordered)] += op.times * time.collective
    serial = busy + sum(collectives.values())
    # The same terms summed in another order: rounding must not make overlap take longer.
    overlapped = min(serial, _overlapped(ops, times)) if overlaps(chip) else serial
    ideal = sum(op.times * op.flops / chip.rate(op.dtype) for op in ops)
    estimate = TimeEstimate(
        compute,
        memory,
        busy,
        dict(collectives),
        serial,
        overlapped,
        ideal / overlapped if overlapped else 0.0,
        _limit(compute, memory, busy, collectives),
        _assumptions(chip),
    )
    return estimate, grouped(_events(ops, times))


def _first_touched(program: DeviceProgram, chip: Chip) -> Iterator[DeviceOp]:
    """Of virtual devices: the temporaries that the process allocates in each step."""
    nbytes = program.memory.activations
    if new_memory_seconds(nbytes, chip):
        yield DeviceOp("first touch", "", fresh=nbytes)


def _waited(ops: Sequence[DeviceOp], times: list[OpTime], mesh: Mesh, chip: Chip) -> list[OpTime]:
    """The times on virtual devices, which arrive at a collective one after the other and wait.

    How far apart they arrive depends on the work since the collective before. A collective right
    after one along another axis waits for all devices along both axes.
    """
    if not chip.waits:
        return times
    result, before, work = list[OpTime](), frozenset[str](), 0.0
    for op, time in zip(ops, times, strict=True):
        if op.is_collective:
            axes = frozenset(op.axes)
            size = math.prod(mesh.shape[axis] for axis in axes | before)
            share = min(1.0, work / chip.between) if chip.between else 1.0
            wait = share * chip.waits.get(size, 0.0)
            time, before, work = OpTime(collective=time.collective + wait), axes, 0.0
        else:
            work += time.busy
        result.append(time)
    return result


def _overlapped(ops: Iterable[DeviceOp], times: Iterable[OpTime]) -> float:
    busy: defaultdict[int, float] = defaultdict(float)
    collectives: defaultdict[int, float] = defaultdict(float)
    first: defaultdict[int, float] = defaultdict(float)
    total = 0.0
    for op, time in zip(ops, times, strict=True):
        busy[op.scope] += op.times * time.busy
        if op.waits:
            total += op.times * time.collective
        else:
            collectives[op.scope] += op.times * time.collective
            first[op.scope] += time.collective
    total += busy.pop(0, 0.0) + collectives.pop(0, 0.0)
    for scope, computing in busy.items():
        exposed = min(first[scope], collectives[scope])
        total += exposed + max(computing, collectives[scope] - exposed)
    return total


def _limit(compute: float, memory: float, busy: float, collectives: dict[str, float]) -> str:
    longest = max(collectives, key=collectives.__getitem__, default="")
    if longest and collectives[longest] > busy:
        return longest
    return "compute" if compute >= memory else "memory"


def _events(ops: Iterable[DeviceOp], times: Iterable[OpTime]) -> Iterable[TimelineEvent]:
    start = 0.0
    for op, time in zip(ops, times, strict=True):
        taken = op.times * time.seconds
        if taken:
            kind = op.name if op.is_collective else "compute"
            yield TimelineEvent(kind, op.axes, start, taken, op.live, op.line)
            start += taken


def _assumptions(chip: Chip) -> tuple[str, ...]:
    flops = COMPUTE_REACH.get(chip.platform, 1.0)
    moved = MEMORY_REACH[chip.platform]
    linked = 1.0 if chip.platform == "cpu" else collective_times.LINKS_REACH
    both = "sum" if chip.platform == "cpu" else "longer"
    new = (
        f"temporaries of more than {chip.kept >> 20} MiB are new memory in each step: "
        f"{chip.fresh / 1e9:.2g} GB/s a device",
    )
    most = max(chip.waits, default=0)
    waits = (
        f"devices of a collective wait for the last of them, {most} devices up to "
        f"{chip.waits.get(most, 0.0) * 1e3:.2g} ms",
    )
    return (
        f"an operation takes the {both} of its flops at {flops:.0%} of the peak and its bytes at "
        f"{moved:.0%} of the memory's bandwidth",
        f"collectives get {linked:.0%} of their links and nothing else uses these",
        "overlapped: collectives of a loop run beside its computing, all but those of its first "
        "iteration and those that wait for what it computes; those outside of loops are exposed"
        if overlaps(chip)
        else "nothing overlaps: the same cores compute and copy between devices",
        "utilisation counts all operations of the program, recomputed ones too",
        f"rates of {chip.name}: {chip.source}",
        *(new if chip.fresh else ()),
        *(waits if chip.waits else ()),
    )


MOST_EVENTS = 200
"""Events of a shortened timeline."""


def grouped(events: Iterable[TimelineEvent], most: int = MOST_EVENTS) -> tuple[TimelineEvent, ...]:
    """Shorten a timeline.

    Neighbours of one kind, axes and line are merged. If more than `most` remain, stretches of the
    timeline are merged: in each, all events of one kind and axes, with the line of most seconds.

    Args:
        events: in order.
        most: how many may remain.

    Returns:
        Events in order, of the same total time.
    """
    short = _neighbours(events)
    length = 2
    stretched = short
    while len(stretched) > most and length < 2 * len(short):
        stretched = [
            event
            for start in range(0, len(short), length)
            for event in _stretch(short[start : start + length])
        ]
        length *= 2
    return _started(stretched)


def _neighbours(events: Iterable[TimelineEvent]) -> list[TimelineEvent]:
    short: list[TimelineEvent] = []
    for event in events:
        if short and _key(short[-1]) == _key(event) and short[-1].line == event.line:
            short[-1] = _merged([short[-1], event])
        else:
            short.append(event)
    return short


def _stretch(events: Sequence[TimelineEvent]) -> list[TimelineEvent]:
    stretch: dict[tuple[str, tuple[str, ...]], list[TimelineEvent]] = {}
    for event in events:
        stretch.setdefault(_key(event), []).append(event)
    return [_merged(same) for same in stretch.values()]


def _merged(events: Sequence[TimelineEvent]) -> TimelineEvent:
    by_line: dict[str, float] = {}
    for event in events:
        by_line[event.line] = by_line.get(event.line, 0.0) + event.seconds
    first = events[0]
    return TimelineEvent(
        first.what,
        first.axes,
        first.start,
        sum(event.seconds for event in events),
        max(event.memory for event in events),
        max(by_line, key=by_line.__getitem__),
    )


def _started(events: Iterable[TimelineEvent]) -> tuple[TimelineEvent, ...]:
    """The events one after the other."""
    at, placed = 0.0, []
    for event in events:
        placed.append(
            TimelineEvent(event.what, event.axes, at, event.seconds, event.memory, event.line)
        )
        at += event.seconds
    return tuple(placed)


def _key(event: TimelineEvent) -> tuple[str, tuple[str, ...]]:
    return event.what, event.axes
