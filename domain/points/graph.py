"""Graphs over devices: rows of the neighbours' shards, and sums over edges.

Nodes are split. Each edge is in the shard of the node that receives, so a sum over the edges of a
node needs nothing from other devices; before it, each device fetches the rows of the senders in
other shards, its ghosts, each of them once.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> mesh = make_mesh((4,), ("x",))
>>> nodes = shard(jnp.arange(8.0)[:, None], mesh, ("x",))
>>> graph = partition_graph([0, 2, 7, 6], [1, 1, 0, 7], nodes)
>>> graph
GraphHalo(4 edges, 3, 0, 0, 1 per device; 8 nodes over ('x',); 2 ghost rows in 2 hops)
>>> graph.segment_sum(graph.senders(nodes)).reshape(-1).tolist()
[7.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 6.0]

A hop sends rows from every device to the one so many devices further; hops that no edge needs
are skipped. Where nodes that are near each other are in the same shard or the next, that is
two. Everything is differentiable: gradients of ghosts go back the way their rows came.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.kit import (
    ShardingError,
    Tracer,
    UnevenArray,
    any_framework,
    any_mesh,
    padded_of,
    shard,
    sharding_of,
)

from .edges import SortedEdges, sort_edges
from .row_splits import RowSplit, read_rows


@any_mesh
def partition_graph(senders: Any, receivers: Any, nodes: Any) -> GraphHalo:
    """Shard the edges of a graph with their receiving nodes.

    Args:
        senders: int[edges] on the host, the node where each edge starts, counted over all shards.
        receivers: likewise, where it ends.
        nodes: a jax.Array or UnevenArray over a mesh with a row for each node, split by rows; its
            layout is noted, and no values are kept.

    Returns:
        The graph; a pytree, to be passed to compiled functions.

    Raises:
        ShardingError: the three do not fit; all errors in one message.

    Example:
        >>> partition_graph([0], [8], jnp.zeros((8, 2)))
        Traceback (most recent call last):
            ...
        isoshard.core.errors.ShardingError: these make no graph over a mesh: nodes are on no mesh: shard them, iso.shard(nodes, mesh, spec); receivers name nodes [8], and there are 0..7.
    """  # noqa: E501
    layout = sharding_of(nodes) if isinstance(padded_of(nodes), jax.Array) else None
    ends = {"senders": np.asarray(senders), "receivers": np.asarray(receivers)}
    errors: list[str] = []
    rows = None
    if isinstance(layout, NamedSharding) and not isinstance(padded_of(nodes), Tracer):
        rows = read_rows("nodes", nodes, layout.mesh, None, errors)
    else:
        errors.append("nodes are on no mesh: shard them, iso.shard(nodes, mesh, spec)")
    for name, ids in ends.items():
        errors += _id_errors(name, ids, len(padded_of(nodes)) if not rows else rows.count)
    if ends["senders"].shape != ends["receivers"].shape:
        errors.append(
            f"there are {ends['senders'].shape} senders for {ends['receivers'].shape} receivers"
        )
    if errors or rows is None:
        raise ShardingError(f"these make no graph over a mesh: {'; '.join(errors)}.")
    sent, received = ends["senders"].astype(np.int64), ends["receivers"].astype(np.int64)
    extent = padded_of(nodes).shape[0]
    edges = sort_edges(sent, received, rows.sizes, extent // len(rows.sizes))
    return GraphHalo._of(edges, rows, extent)


@jax.tree_util.register_pytree_node_class
class GraphHalo:
    """Edges in the shards of their receivers, and how to fetch the senders.

    `partition_graph` creates it. A pytree: the indices of rows are its leaves.

    Attributes:
        nodes: the split of the nodes.
        sizes: edges on each device.
        ghosts: rows that are fetched, over all devices.
        edge_ids: an UnevenArray int32[edges]: the index of each edge in the order passed to
            `partition_graph`.

    Example:
        >>> nodes = shard(jnp.arange(8.0), jax.make_mesh((4,), ("x",)), ("x",))
        >>> graph = partition_graph([0, 7], [1, 0], nodes)     # node 7 is sent to the first device
        >>> graph.sizes, graph.ghosts
        ((2, 0, 0, 0), 1)
    """

    nodes: RowSplit
    sizes: tuple[int, ...]
    ghosts: int
    edge_ids: UnevenArray
    _extent: int
    _pairs: tuple[tuple[tuple[int, int], ...], ...]
    _lists: tuple[Any, ...]

    @classmethod
    def _of(cls, edges: SortedEdges, nodes: RowSplit, extent: int) -> GraphHalo:
        """Place the indices of rows on the devices."""

        def to_devices(rows: np.ndarray) -> jax.Array:
            return shard(rows.reshape(-1).astype(np.int32), nodes.mesh, nodes.spec, copy=True)

        width = edges.senders.shape[1]
        ids = np.zeros(edges.senders.shape, np.int64)
        ids[np.arange(width) < np.array(edges.sizes)[:, None]] = edges.order
        graph = object.__new__(cls)
        graph.nodes, graph._extent, graph.sizes = nodes, extent, edges.sizes
        graph.ghosts = sum(int((hop.rows < graph._block).sum()) for hop in edges.hops)
        graph._pairs = tuple(hop.pairs for hop in edges.hops)
        graph.edge_ids = UnevenArray(to_devices(ids), (len(edges.order),), (edges.sizes,))
        tables = (edges.senders, edges.receivers, *(hop.rows for hop in edges.hops))
        graph._lists = tuple(map(to_devices, tables))
        return graph

    @any_framework
    def senders(self, x: Any) -> UnevenArray:
        """For each edge the row of the node where it starts.

        Args:
            x: [nodes, ..], sharded as the nodes were.

        Returns:
            [edges, ..], in the order of `edge_ids`; padding is 0 and has no gradient. Rows of
            other devices come by one collective-permute per hop.

        Raises:
            ShardingError: `x` has other rows.
        """
        rows = _fetch(self.nodes, self._pairs, self._read(x), self._lists[0], self._lists[2:])
        return self._edges(rows, x)

    @any_framework
    def receivers(self, x: Any) -> UnevenArray:
        """For each edge the row of the node where it ends; nothing is sent.

        Args:
            x: [nodes, ..], sharded as the nodes were.

        Returns:
            [edges, ..], in the order of `edge_ids`; padding is 0 and has no gradient.

        Raises:
            ShardingError: `x` has other rows.
        """
        return self._edges(_fetch(self.nodes, (), self._read(x), self._lists[1], ()), x)

    @any_mesh
    def edges(self, values: Any) -> UnevenArray:
        """Shard the attributes of each edge, such as its length.

        Args:
            values: [edges, ..], in the order given to `partition_graph`, replicated or
                on the host.

        Returns:
            [edges, ..], in the order of `edge_ids`; nothing is sent.

        Raises:
            ShardingError: there are not as many rows as edges.
        """
        values = jnp.asarray(values)
        if values.ndim == 0 or values.shape[0] != sum(self.sizes):
            raise ShardingError(
                f"values of shape {values.shape} are not one row for each of "
                f"{sum(self.sizes)} edges, in the order given to partition_graph."
            )
        rows = _choose(self.nodes, self._block, self.edge_ids.array, self._lists[1], values)
        return self._edges(rows)

    @any_mesh
    def segment_sum(self, messages: Any) -> Any:
        """Sum, for each node, over the edges that end there; nothing is sent.

        Args:
            messages: [edges, ..], an UnevenArray as `senders` gives it, or its padded array after
                any function of each row; padding is not read.

        Returns:
            [nodes, ..], sharded as the nodes were; 0 where no edge ends.

        Raises:
            ShardingError: the messages are not one row per edge.
        """
        array = padded_of(messages)
        sizes = self.sizes
        if isinstance(messages, UnevenArray) and messages.ndim:
            each = len(array) // len(sizes)
            sizes = messages.sizes[0] or (each,) * len(sizes)
        if not array.ndim or sizes != self.sizes or array.shape[0] != self._lists[1].shape[0]:
            raise ShardingError(
                f"messages of shape {array.shape} with {sizes} valid rows are not those of this "
                f"graph, whose devices have {self.sizes} edges in blocks of "
                f"{self._lists[1].shape[0] // len(self.sizes)}: make them from graph.senders, "
                "graph.receivers and graph.edges."
            )
        return self.nodes.like(_add(self.nodes, self._block, array, self._lists[1]), messages)

    @property
    def _block(self) -> int:
        """Rows of nodes on each device, padding included."""
        return self._extent // len(self.nodes.sizes)

    def _read(self, x: Any) -> Any:
        array = padded_of(x)
        sizes = x.sizes[0] if isinstance(x, UnevenArray) and x.ndim else None
        if (
            array.ndim == 0
            or array.shape[0] != self._extent
            or (self.nodes.uneven and sizes != self.nodes.sizes)
        ):
            raise ShardingError(
                f"x, {_describe(x)}, has not the rows of the nodes of this graph: "
                f"{self.nodes.count}, {', '.join(map(str, self.nodes.sizes))} over "
                f"{self.nodes.axes}."
            )
        return array

    def _edges(self, array: Any, other: Any = None) -> UnevenArray:
        shape = (sum(self.sizes), *array.shape[1:])
        sizes = (self.sizes, *[None] * (array.ndim - 1))
        return UnevenArray(array, shape, sizes, self.nodes.layout(array.ndim, other))

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The indices of rows, and the rest as static data."""
        static = (self.nodes, self.sizes, self.ghosts, self._extent, self._pairs)
        return (self.edge_ids, self._lists), static

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], leaves: tuple[Any, ...]) -> GraphHalo:
        """The same around other leaves."""
        graph = object.__new__(cls)
        graph.nodes, graph.sizes, graph.ghosts, graph._extent, graph._pairs = static
        graph.edge_ids, graph._lists = leaves
        return graph

    def __repr__(self) -> str:
        """Counts and sharding."""
        each = ", ".join(map(str, self.sizes))
        return (
            f"GraphHalo({sum(self.sizes)} edges, {each} per device; {self.nodes.count} nodes over "
            f"{self.nodes.axes}; {self.ghosts} ghost rows in {len(self._pairs)} hops)"
        )


@any_framework
def segment_sum(messages: Any, graph: GraphHalo) -> Any:
    """Sum messages for each node, as `graph.segment_sum(messages)`.

    Args:
        messages: [edges, ..], an UnevenArray as `graph.senders` gives it, or its padded array after
            any function of each row; padding is not read.
        graph: of `partition_graph`.

    Returns:
        [nodes, ..], sharded as the nodes were; 0 where no edge ends.

    Raises:
        ShardingError: the messages are not one row per edge.

    Example:
        >>> nodes = shard(jnp.arange(4.0), jax.make_mesh((4,), ("x",)), ("x",))
        >>> graph = partition_graph([0, 2, 3], [1, 1, 0], nodes)
        >>> segment_sum(graph.senders(nodes), graph).tolist()
        [3.0, 2.0, 0.0, 0.0]
    """
    return graph.segment_sum(messages)


_take = functools.partial(jnp.take, axis=0, mode="fill", fill_value=0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _fetch(nodes: RowSplit, hops: Any, x: Any, rows: Any, sends: Any) -> jax.Array:
    """Local rows and ghost rows."""

    def on_shard(x: jax.Array, rows: jax.Array, sends: tuple[jax.Array, ...]) -> jax.Array:
        ghosts = [
            nodes.permute(_take(x, ids), pairs) for pairs, ids in zip(hops, sends, strict=True)
        ]
        return _take(jnp.concatenate([x, *ghosts]), rows)

    return _split(nodes, on_shard, nodes.spec, nodes.spec, nodes.spec)(x, rows, sends)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _choose(nodes: RowSplit, block: int, ids: Any, rows: Any, values: Any) -> jax.Array:
    """The values of each device's edges, of all."""

    def on_shard(ids: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
        return _take(values, jnp.where(rows < block, ids, values.shape[0]))

    return _split(nodes, on_shard, nodes.spec, nodes.spec, P())(ids, rows, values)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _add(nodes: RowSplit, block: int, messages: Any, rows: Any) -> jax.Array:
    """The sums for each device's nodes."""

    def on_shard(messages: jax.Array, rows: jax.Array) -> jax.Array:
        sums = jnp.zeros((block, *messages.shape[1:]), messages.dtype)
        return sums.at[rows].add(messages, mode="drop")

    return _split(nodes, on_shard, nodes.spec, nodes.spec)(messages, rows)


def _split(nodes: RowSplit, function: Callable[..., Any], *specs: Any) -> Callable[..., Any]:
    """Map a function over every device's rows; mesh axes that do not split nodes remain Auto."""
    return jax.shard_map(
        function,
        mesh=nodes.mesh,
        in_specs=specs,
        out_specs=nodes.spec,
        axis_names=set(nodes.axes),
    )


def _describe(x: Any) -> str:
    return repr(x) if isinstance(x, UnevenArray) else f"of shape {tuple(x.shape)}"


def _id_errors(name: str, ids: np.ndarray, nodes: int) -> list[str]:
    if ids.ndim != 1 or not (ids.dtype.kind in "iu" or ids.size == 0):
        return [f"{name} of shape {ids.shape} and {ids.dtype} are no list of nodes"]
    wrong = ids[(ids < 0) | (ids >= nodes)]
    if len(wrong):
        return [f"{name} name nodes {wrong[:5].tolist()}, and there are 0..{nodes - 1}"]
    return []
