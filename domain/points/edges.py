"""Edges of a graph, sorted by the shard of the node that receives.

Which rows a device needs from each other device is computed once, on the host:

>>> sorted_edges = sort_edges(np.array([0, 3, 3, 1]), np.array([1, 1, 2, 3]), (2, 2), 2)
>>> sorted_edges.order.tolist(), sorted_edges.sizes      # two edges end in each half
([0, 1, 2, 3], (2, 2))
>>> sorted_edges.hops                                    # one hop, of one row per device
(Hop(pairs=((0, 1), (1, 0)), rows=array([[1],
       [1]])),)
>>> sorted_edges.senders.tolist()                        # rows 0 and 1 are local, 2 is a ghost
[[0, 2], [1, 2]]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Hop(NamedTuple):
    """Rows sent from each device to the one `n` devices further, for one `n`.

    Attributes:
        pairs: (from, to), without those that have nothing to send.
        rows: int[devices, width], the rows of its own that each sends; past the end where there
            are no more.
    """

    pairs: tuple[tuple[int, int], ...]
    rows: np.ndarray


class SortedEdges(NamedTuple):
    """Edges in blocks, one per device.

    Attributes:
        order: int[edges], the edges by receiver's shard, in the order given within each.
        sizes: edges of each device.
        senders: int[devices, width], for each edge the row of its sender: local rows first,
            then those of the hops, in order; past all of them where there are no more edges.
        receivers: likewise the row of its receiver, always local.
        hops: the rows to send.
    """

    order: np.ndarray
    sizes: tuple[int, ...]
    senders: np.ndarray
    receivers: np.ndarray
    hops: tuple[Hop, ...]


def sort_edges(
    senders: np.ndarray, receivers: np.ndarray, sizes: Sequence[int], block: int
) -> SortedEdges:
    """Sort edges by receiver, and list the ghost rows."""
    devices = len(sizes)
    ends = np.cumsum(sizes)
    starts = ends - np.array(sizes)
    home = np.searchsorted(ends, receivers, side="right")
    order = np.argsort(home, kind="stable")
    count = np.bincount(home, minlength=devices)
    sent, received = senders[order], receivers[order]
    source, home = np.searchsorted(ends, sent, side="right"), home[order]
    away = (home - source) % devices
    rows, taken, hops = sent - starts[source], block, []
    for distance in range(1, devices):
        selected = away == distance
        if selected.any():
            hop, offset = _hop(home[selected], sent[selected], starts, distance, block)
            rows[selected] = taken + offset
            taken += hop.rows.shape[1]
            hops.append(hop)
    width = max(1, count.max())
    column = np.arange(len(order)) - (np.cumsum(count) - count)[home]
    table = np.full((2, devices, width), [[[taken]], [[block]]])
    table[0, home, column] = rows
    table[1, home, column] = received - starts[home]
    return SortedEdges(order, tuple(count.tolist()), table[0], table[1], tuple(hops))


def _hop(
    home: np.ndarray, nodes: np.ndarray, starts: np.ndarray, distance: int, block: int
) -> tuple[Hop, np.ndarray]:
    """The rows sent `distance` devices further, and each edge's offset among them."""
    devices = len(starts)
    needed, which = np.unique(np.stack([home, nodes]), axis=1, return_inverse=True)
    count = np.bincount(needed[0], minlength=devices)
    column = np.arange(needed.shape[1]) - (np.cumsum(count) - count)[needed[0]]
    source = (needed[0] - distance) % devices
    rows = np.full((devices, count.max()), block)
    rows[source, column] = needed[1] - starts[source]
    pairs = sorted((int((to - distance) % devices), int(to)) for to in np.flatnonzero(count))
    return Hop(tuple(pairs), rows), column[which.reshape(-1)]
