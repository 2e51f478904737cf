"""Which edges lie where, and which rows are sent: any graph, in NumPy."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from isoshard.core.domain.points.edges import sort_edges


@st.composite
def graphs(draw):
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any))
    node = st.integers(0, sum(sizes) - 1)
    pairs = draw(st.lists(st.tuples(node, node), max_size=30))
    block = max(sizes) + draw(st.integers(0, 2))
    return np.array(pairs, np.int64).reshape(-1, 2).T, tuple(sizes), block


@settings(max_examples=200, deadline=None)
@given(graphs())
def test_every_edge_finds_its_nodes(graph):
    (senders, receivers), sizes, block = graph
    edges = sort_edges(senders, receivers, sizes, block)
    devices = len(sizes)
    starts = np.cumsum(sizes) - np.array(sizes)
    nodes = np.full((devices, block), -1)
    for device, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        nodes[device, :size] = np.arange(start, start + size)
    seen = [list(row) for row in nodes]
    for hop in edges.hops:
        padded = np.concatenate([nodes, np.full((devices, 1), -2)], axis=1)
        sent = np.take_along_axis(padded, hop.rows, axis=1)
        (distance,) = {(to - source) % devices for source, to in hop.pairs}
        assert distance > 0 and {source for source, _ in hop.pairs} == set(
            np.flatnonzero((sent >= 0).any(1)).tolist()
        )
        for device in range(devices):
            ghosts = sent[(device - distance) % devices].tolist()
            assert len(set(seen[device]) & set(ghosts) - {-1, -2}) == 0  # each row once
            seen[device] += ghosts
    assert sum(edges.sizes) == len(edges.order) == len(senders)
    at = 0
    for device, count in enumerate(edges.sizes):
        mine = edges.order[at : at + count]
        at += count
        there = seen[device]
        assert [there[row] for row in edges.senders[device, :count]] == senders[mine].tolist()
        home = nodes[device][edges.receivers[device, :count]]
        assert home.tolist() == receivers[mine].tolist() and (np.diff(mine) > 0).all()
        assert (edges.senders[device, count:] == len(there)).all()
        assert (edges.receivers[device, count:] == block).all()
