"""Seconds of one collective, by the algorithm that the links of its axes allow.

Every device of a group receives what it does not have; the time is those bytes over the bandwidth
of its links, level by level, plus the latency of the first byte. With `n` devices and `V` bytes of
a global result:

| collective | bytes over a device's links |
|---|---|
| all-gather, reduce-scatter | `V (n - 1) / n`: in rings, blocks, or a switch |
| all-reduce | twice that: a reduce-scatter, then an all-gather |
| all-to-all | `V (n - 1) / n` through a switch; of a torus what crosses the longest axis's middle |
| collective-permute | `V`, over one link: a shift by one |

Over several levels (a slice and DCN, a host and its network) each level carries only the bytes
that the one inside it cannot: each of `m` devices inside sends its m-th of them across. The levels
work at once, on chunks, so the slowest one counts; their latencies add up.

Virtual devices of a CPU wait for each other once, and each gets all bytes of its result by copies,
at the rate measured for the kind and the number of devices.

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
"""The collectives that `seconds` supports, by HLO's names."""

LINKS_REACH = 0.82
"""The share of a link's bandwidth that large collectives reach: 560 of 680 us on a v5e, and 370 of
450 GB/s over NVLink (both in the scaling book). Copies in memory have measured rates."""

_ALIASES = {
    "ragged-all-to-all": "all-to-all",
    "all-gather-start": "all-gather",
    "all-reduce-start": "all-reduce",
    "collective-permute-start": "collective-permute",
    "collective-broadcast": "collective-permute",
    "send": "collective-permute",
    "recv": "collective-permute",
}


def seconds(
    kind: str, nbytes: int, axes: Sequence[str], mesh: Mesh, *, reach: float | None = None
) -> float:
    """Seconds of one collective if nothing else uses its links.

    Args:
        kind: HLO's name, one of `KINDS`, also as an asynchronous start.
        nbytes: of its result on one device; of a reduce-scatter, of its operand.
        axes: its mesh axes; several form one group.
        mesh: over attached or described devices.
        reach: the share of the links' bandwidth that it gets; None: `LINKS_REACH`, of a CPU all.

    Raises:
        ShardingError: the kind is not supported, or there is no such axis.

    Example:
        >>> from isoshard.planner.machine.topologies import topology
        >>> mesh = topology("h100:1x8").mesh((8,), ("x",))
        >>> round(seconds("all-gather", 2**29, ("x",), mesh, reach=1.0) * 1e3, 2)  # ms
        1.05
    """
    name = _ALIASES.get(kind, kind)
    if name not in KINDS:
        raise ShardingError(f"{kind!r} is not a collective: {', '.join(KINDS)} are")
    run_on = links_of(mesh, axes)
    if run_on.size == 1 or nbytes <= 0:
        return 0.0
    if run_on.kind == "memory":
        rates = topology_of(mesh).chip.copied.get(name, {})
        rate = rates.get(run_on.size, run_on.bandwidth)
        return nbytes / (rate * (reach or 1.0)) + run_on.latency
    if reach is None:
        reach = LINKS_REACH
    if name == "all-to-all":
        return _exchanged(nbytes, run_on, reach)
    if name == "collective-permute":
        return _shifted(nbytes, run_on, reach)
    passes = 2 if name == "all-reduce" else 1
    return passes * _gathered(nbytes, run_on, reach)


def _gathered(nbytes: int, run_on: AxisLinks, reach: float) -> float:
    """An all-gather; a reduce-scatter is the same backwards."""
    inside, slowest = 1, 0.0
    for level in run_on.levels:
        moved = nbytes / inside * (level.size - 1) / level.size
        slowest = max(slowest, moved / (level.bandwidth * reach))
        inside *= level.size
    return slowest + run_on.latency


def _exchanged(nbytes: int, run_on: AxisLinks, reach: float) -> float:
    """An all-to-all: each device has a chunk for each other one."""
    slowest, inside = 0.0, 1
    for level in run_on.levels:
        inside *= level.size
        # The bytes within this level, of which some leave the level inside it.
        within = nbytes * inside / run_on.size
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


def _shifted(nbytes: int, run_on: AxisLinks, reach: float) -> float:
    """A permute to the next device: over the slowest of the networks, over one link of a torus."""
    outer = run_on.levels[-1]
    shared = max((way.shared for way in outer.ways), default=1)
    ring = all(way.ring for way in outer.ways)
    hops = 1 if ring else math.prod(way.size - 1 for way in outer.ways)
    return nbytes * shared / (outer.link * reach) + outer.latency * max(1, hops)
