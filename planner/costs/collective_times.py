"""Seconds of one collective, by the algorithm that the links of its axes allow.

Every device of a group receives what it lacks; the time is those bytes over what its links carry,
level by level, and the first byte's way. With `n` devices and `V` bytes of a whole result:

| collective | bytes that pass a device's links |
|---|---|
| all-gather, reduce-scatter | `V (n - 1) / n`: in rings, blocks, or a switch |
| all-reduce | twice that: a reduce-scatter, then an all-gather |
| all-to-all | `V (n - 1) / n` through a switch; of a torus what crosses the longest axis's middle |
| collective-permute | `V`, over one link: a shift by one |

Over several levels (a slice and DCN, a host and its network) each level carries only what the one
inside it left: of `m` devices inside, each brings its m-th of the bytes across. The levels work at
once, on chunks, so the slowest one counts; their latencies add up.

Virtual devices of a CPU meet once, and each is given all bytes of its result by copies, at the rate
that was measured for the kind and for so many devices.

Sources: ring, torus and all-to-all on it: "How to Scale Your Model", chapter on sharding
(https://jax-ml.github.io/scaling-book/sharding); switches and hosts: its chapter on GPUs
(https://jax-ml.github.io/scaling-book/gpus); factors: doc/PERFORMANCE.md of
https://github.com/NVIDIA/nccl-tests. Reductions inside switches (SHARP) are not counted.

>>> from isoshard.planner.machine.topologies import topology
>>> mesh = topology("v5e:16x16").mesh((16, 16), ("data", "model"))
>>> gather = seconds("all-gather", 2**30, ("model",), mesh, reach=1.0)
>>> round(gather * 9e10 / 2**30, 2)  # 15 / 16, and little latency: a ring has both directions
0.94
>>> seconds("all-gather", 2**30, ("data", "model"), mesh) < gather  # two axes have four links
True
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax.sharding import Mesh

from isoshard.core.kit import ShardingError

from ..machine.links import AxisLinks, LinkLevel, links_of
from ..machine.topologies import topology_of

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
"""The collectives that `seconds` knows, as HLO calls them."""

LINKS_REACH = 0.82
"""Of a link's bytes a second what collectives reach, if they are large: 560 of 680 us on a v5e, and
370 of 450 GB/s over NVLink (both in the scaling book). Copies in memory reach what was measured."""

_ALSO = {
    "ragged-all-to-all": "all-to-all",
    "all-gather-start": "all-gather",
    "all-reduce-start": "all-reduce",
    "collective-permute-start": "collective-permute",
    "collective-broadcast": "collective-permute",
    "send": "collective-permute",
    "recv": "collective-permute",
}


def seconds(
    kind: str, sent: int, axes: Sequence[str], mesh: Mesh, *, reach: float | None = None
) -> float:
    """How long one collective takes if nothing else uses its links.

    Args:
        kind: as HLO calls it, one of `KINDS`, also as an asynchronous start.
        sent: bytes of its result on one device; of a reduce-scatter, of its operand.
        axes: mesh axes along which devices talk; along several they talk as one group.
        mesh: over devices that are here or described.
        reach: which part of the links' rate it gets; None: `LINKS_REACH`, of a CPU all.

    Raises:
        ShardingError: there is no such collective, or no such axis.

    Example:
        >>> from isoshard.planner.machine.topologies import topology
        >>> mesh = topology("h100:1x8").mesh((8,), ("x",))
        >>> round(seconds("all-gather", 2**29, ("x",), mesh, reach=1.0) * 1e3, 2)  # ms
        1.05
    """
    name = _ALSO.get(kind, kind)
    if name not in KINDS:
        raise ShardingError(f"there is no collective {kind!r}; those known are {', '.join(KINDS)}")
    run_on = links_of(mesh, axes)
    if run_on.size == 1 or sent <= 0:
        return 0.0
    if run_on.kind == "memory":
        rates = topology_of(mesh).chip.copied.get(name, {})
        rate = rates.get(run_on.size, run_on.bandwidth)
        return sent / (rate * (reach or 1.0)) + run_on.latency
    if reach is None:
        reach = LINKS_REACH
    if name == "all-to-all":
        return _exchanged(sent, run_on, reach)
    if name == "collective-permute":
        return _shifted(sent, run_on, reach)
    passes = 2 if name == "all-reduce" else 1
    return passes * _gathered(sent, run_on, reach)


def _gathered(sent: int, run_on: AxisLinks, reach: float) -> float:
    """An all-gather; a reduce-scatter is the same backwards."""
    inside, slowest = 1, 0.0
    for level in run_on.levels:
        moved = sent / inside * (level.size - 1) / level.size
        slowest = max(slowest, moved / (level.bandwidth * reach))
        inside *= level.size
    return slowest + run_on.latency


def _exchanged(sent: int, run_on: AxisLinks, reach: float) -> float:
    """An all-to-all: each device has a chunk for each other one."""
    slowest, inside = 0.0, 1
    for level in run_on.levels:
        inside *= level.size
        # What stays within this level, of it what leaves the level inside it.
        within = sent * inside / run_on.size
        slowest = max(slowest, _across(within, level) / reach)
    return slowest + run_on.latency


def _across(within: float, level: LinkLevel) -> float:
    if not level.ways:
        return within * (level.size - 1) / level.size / level.bandwidth
    # Half of all bytes crosses the middle of an axis: of a ring at two places. With n chips along
    # it, each column of n sends n / 4 of a chip's bytes over each link there.
    return max(
        way.size / 4 * within / (level.link * (1 + way.ring)) * way.shared for way in level.ways
    )


def _shifted(sent: int, run_on: AxisLinks, reach: float) -> float:
    """A permute to the next device: over the slowest of the networks, over one link of a torus."""
    outer = run_on.levels[-1]
    shared = max((way.shared for way in outer.ways), default=1)
    ring = all(way.ring for way in outer.ways)
    hops = 1 if ring else math.prod(way.size - 1 for way in outer.ways)
    return sent * shared / (outer.link * reach) + outer.latency * max(1, hops)
