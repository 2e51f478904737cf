"""Messages over a graph in shards, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import isoshard as iso
from isoshard import P
from isoshard.domain.points import GraphHalo, partition_graph, segment_sum

from . import clouds

NODES = clouds.cloud(40, 0, 4)
SENDERS, RECEIVERS = np.random.default_rng(1).integers(0, 40, (2, 90))
LENGTHS = np.random.default_rng(2).uniform(0.5, 1.5, (90, 1)).astype(np.float32)
WEIGHTS = clouds.cloud(40, 3, 4)


def messages(sent, received, lengths):
    return jnp.sqrt(lengths * jnp.square(sent - received) + 1) - lengths


def layer(graph, nodes, lengths):
    """Padding of messages becomes NaN, which nobody may read."""
    edges = (graph.senders(nodes), graph.receivers(nodes), graph.edges(lengths))
    made = messages(*(edge.array for edge in edges))
    return graph.segment_sum(jnp.where(edges[0].mask(), made, jnp.nan))


def in_numpy(nodes, lengths):
    """The layer, and the gradients of its sum times the weights."""
    nodes, lengths = nodes.astype(np.float64), lengths.astype(np.float64)
    apart = nodes[SENDERS] - nodes[RECEIVERS]
    root = np.sqrt(lengths * apart**2 + 1)
    out = np.zeros_like(nodes)
    np.add.at(out, RECEIVERS, root - lengths)
    slope = WEIGHTS[RECEIVERS] * lengths * apart / root
    of_nodes = np.zeros_like(nodes)
    np.add.at(of_nodes, SENDERS, slope)
    np.add.at(of_nodes, RECEIVERS, -slope)
    of_lengths = WEIGHTS[RECEIVERS] * (apart**2 / (2 * root) - 1)
    return out, of_nodes, of_lengths.sum(1, keepdims=True)


def test_a_layer_of_messages():
    axes, sizes = ("y", "x"), (3, 0, 7, 9, 1, 11, 4, 5)
    mesh = iso.make_mesh((2, 4), ("x", "y"))
    nodes, weights = (clouds.lay_out(x, mesh, axes, sizes) for x in (NODES, WEIGHTS))
    graph = partition_graph(SENDERS, RECEIVERS, nodes)
    lengths = iso.shard(LENGTHS, mesh, P())

    @jax.jit
    def step(graph, nodes, lengths):
        def loss(nodes, lengths):
            out = layer(graph, nodes, lengths)
            return jnp.where(out.mask(), out.array * weights.array, 0).sum(), out

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(nodes, lengths)

    (_, out), (of_nodes, of_lengths) = step(graph, nodes, lengths)
    want, want_nodes, want_lengths = in_numpy(NODES, LENGTHS)
    np.testing.assert_allclose(clouds.whole(out), want, atol=1e-5)
    np.testing.assert_allclose(clouds.whole(of_nodes), want_nodes, atol=1e-5)
    np.testing.assert_allclose(of_lengths, want_lengths, atol=1e-5)
    for made in (out, of_nodes):
        assert made.array.sharding.is_equivalent_to(nodes.array.sharding, 2)
    order = clouds.whole(graph.edge_ids)
    np.testing.assert_array_equal(clouds.whole(graph.senders(nodes)), NODES[SENDERS[order]])
    np.testing.assert_array_equal(clouds.whole(graph.edges(LENGTHS)), LENGTHS[order])


def test_a_chain_needs_two_hops_of_one_row():
    mesh = iso.make_mesh((8,), ("x",))
    nodes = clouds.lay_out(NODES, mesh, "x")
    left, right = np.arange(39), np.arange(1, 40)
    graph = partition_graph(np.r_[left, right], np.r_[right, left], nodes)
    assert graph.ghosts == 14 and "14 ghost rows in 2 hops" in repr(graph)
    function = jax.jit(lambda g, x: segment_sum(g.senders(x), g))
    text = function.lower(graph, nodes).compile().as_text()
    sends = [line for line in text.splitlines() if " collective-permute(" in line]
    assert len(sends) == 2 and all("f32[1,4]" in line for line in sends)
    assert not any(name in text for name in ("all-gather", "all-reduce(", "all-to-all"))
    want = np.zeros_like(NODES)
    want[1:] += NODES[:-1]
    want[:-1] += NODES[1:]
    np.testing.assert_allclose(function(graph, nodes), want, rtol=1e-6)


def test_nodes_of_other_ranks_and_a_graph_without_edges():
    mesh = iso.make_mesh((4,), ("x",))
    numbers = iso.shard(np.arange(8, dtype=np.int32), mesh, P("x"))
    graph = partition_graph([0, 7], [7, 7], numbers)
    assert graph.segment_sum(graph.senders(numbers)).tolist() == [0] * 7 + [7]
    empty = partition_graph([], [], numbers)
    assert empty.sizes == (0, 0, 0, 0) and empty.ghosts == 0
    assert empty.segment_sum(empty.senders(numbers)).tolist() == [0] * 8
    assert jax.tree.structure(graph) == jax.tree.structure(jax.tree.map(lambda x: x, graph))
    assert isinstance(jax.tree.map(lambda x: x, graph), GraphHalo)


def test_what_makes_no_graph():
    mesh = iso.make_mesh((4,), ("x",))
    nodes = clouds.lay_out(NODES, mesh, "x")
    with pytest.raises(
        iso.ShardingError,
        match=r"senders name nodes \[-1, 40\], and there are 0..39; receivers of shape \(1, 2\) "
        r"and float64 are no list of nodes; there are \(2,\) senders for \(1, 2\) receivers",
    ):
        partition_graph([-1, 40], [[0.5, 1]], nodes)
    with pytest.raises(iso.ShardingError, match="nodes are on no mesh"):
        partition_graph([0], [1], jnp.zeros((4, 2)))
    with pytest.raises(iso.ShardingError, match="nodes are on no mesh"):
        jax.jit(lambda x: partition_graph([0], [1], x).segment_sum(x))(nodes)
    graph = partition_graph(SENDERS, RECEIVERS, nodes)
    with pytest.raises(
        iso.ShardingError, match=r"x, of shape \(39, 4\), has not the rows of the n"
    ):
        graph.senders(NODES[:39])
    with pytest.raises(iso.ShardingError, match="not one row for each of 90 edges"):
        graph.edges(LENGTHS[1:])
    with pytest.raises(iso.ShardingError, match="are not those of this graph, whose devices have"):
        graph.segment_sum(nodes)
    uneven = clouds.lay_out(NODES, mesh, "x", (0, 13, 9, 18))
    with pytest.raises(iso.ShardingError, match=r"x, UnevenArray.*has not the rows"):
        graph.receivers(uneven)
    of_uneven = partition_graph(SENDERS, RECEIVERS, uneven)
    with pytest.raises(iso.ShardingError, match="40, 0, 13, 9, 18 over"):
        of_uneven.receivers(nodes)
