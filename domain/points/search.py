"""The search over devices: blocks of points rotate on a ring, candidates are merged.

Points are split over some mesh axes, queries over some, each perhaps over none:

- Along an axis that splits both, the blocks of points travel from device to device, n - 1 hops,
  while each device searches the block it has. Queries do not move.
- Along an axis that splits the points alone, every device searches its block for the same queries.
  Each then merges the findings for its slice of the queries (one all-to-all), and all gather the
  results.
- Along an axis that splits the queries alone, or neither, nothing is sent.

Backward, the gradients of the blocks travel round the same ring, in n - 1 hops, and each device
adds those of its queries; along axes that split the queries alone they are summed.

Results do not depend on the mesh: of points at equal distance, that of lower index is
nearer.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from isoshard.core.kit import ring

from .nearest import Candidates, Tile, merge, nearest, no_candidates
from .row_splits import RowSplit


@dataclasses.dataclass(frozen=True)
class Search:
    """The static arguments of one search.

    Attributes:
        points: their split.
        queries: their split, on the same mesh.
        k: how many to find for each query.
        tile: see `nearest`.
        counted: whether points within the limit are counted.
    """

    points: RowSplit
    queries: RowSplit
    k: int
    tile: Tile
    counted: bool

    @property
    def mesh(self) -> Mesh:
        """That of both."""
        return self.points.mesh

    @property
    def ring(self) -> tuple[str, ...]:
        """The axes that split both, in the order of the mesh, in which `ppermute` counts."""
        both = {*self.points.axes} & {*self.queries.axes}
        return tuple(name for name in self.mesh.axis_names if name in both)

    @property
    def across(self) -> tuple[str, ...]:
        """The axes that split the points alone, in the order of the mesh."""
        alone = {*self.points.axes} - {*self.queries.axes}
        return tuple(name for name in self.mesh.axis_names if name in alone)

    @property
    def hops(self) -> int:
        """Devices in the ring."""
        return math.prod(self.mesh.shape[name] for name in self.ring)

    def block(self, ring_index: Any) -> Any:
        """The index of a block of points, by its device's index in the ring."""
        at = {}
        for name in reversed(self.ring):
            at[name] = ring_index % self.mesh.shape[name]
            ring_index = ring_index // self.mesh.shape[name]
        block = 0
        for name in self.points.axes:
            index = at[name] if name in at else lax.axis_index(name)
            block = block * self.mesh.shape[name] + index
        return block

    def hop(self, x: jax.Array) -> jax.Array:
        """Send to the next device in the ring; receive from the previous one."""
        pairs = [(device, (device + 1) % self.hops) for device in range(self.hops)]
        return lax.ppermute(x, self.ring, pairs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def search(
    config: Search, points: jax.Array, queries: jax.Array, limit: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Find the nearest points of each query.

    Args:
        config: the layouts and sizes.
        points: float[points, coordinates], with padding.
        queries: float[queries, coordinates], with padding.
        limit: float[], squared radius; points beyond it are excluded.

    Returns:
        int32[queries, k] indices, -1 where there is none and in padding;
        float[queries, k, coordinates], those points, else 0; int32[queries], how many
        points are within the limit, or zeros if they are not counted. The points' gradient is that
        of indexing them; the search itself has none.
    """
    split = config.queries.spec
    starts, sizes = _table(config.points)
    _, rows = _table(config.queries)

    def on_shard(block: jax.Array, local_queries: jax.Array, limit: jax.Array) -> Any:
        bound = limit if config.counted else None

        def look(state: Any, block: jax.Array, ring_index: Any) -> Any:
            block_index = config.block(ring_index)
            start, size = starts[block_index], sizes[block_index]
            candidates, count = nearest(
                block, start, size, local_queries, config.k, config.tile, bound
            )
            return merge(state[0], candidates), state[1] + count

        begin = (
            no_candidates(local_queries, block.dtype, config.k),
            jnp.zeros(local_queries.shape[0], jnp.int32),
        )
        if config.ring:
            candidates, count = ring(block, look, config.ring, carry=begin)
        else:
            candidates, count = look(begin, block, 0)
        if config.across:
            candidates, count = _share(candidates, config), lax.psum(count, config.across)
        block_index = lax.axis_index(config.queries.axes) if config.queries.axes else 0
        real = jnp.arange(local_queries.shape[0]) < rows[block_index]
        exists = real[:, None] & (candidates.index >= 0) & (candidates.square <= limit)
        index = jnp.where(exists, candidates.index, -1)
        return index, jnp.where(exists[..., None], candidates.point, 0), jnp.where(real, count, 0)

    return _mapped(on_shard, config, (config.points.spec, split, P()), (split, split, split))(
        points, queries, limit
    )


def _forward(config: Search, points: Any, queries: Any, limit: Any) -> Any:
    results: Any = search(config, points, queries, limit)
    return results, (results[0], points, queries, limit)


def _backward(config: Search, residuals: Any, gradients: Any) -> Any:
    index, points, queries, limit = residuals
    starts, _ = _table(config.points)
    blocks = math.prod(config.mesh.shape[name] for name in config.points.axes)
    rows = points.shape[0] // blocks
    sums = tuple(name for name in config.queries.axes if name not in config.points.axes)

    def on_shard(index: jax.Array, gradient: jax.Array) -> jax.Array:
        ring_index = lax.axis_index(config.ring) if config.ring else 0

        def step_gradient(step: Any) -> jax.Array:
            row = index - starts[config.block((ring_index - step) % config.hops)]
            inside = (index >= 0) & (row >= 0) & (row < rows)
            row = jnp.where(inside, row, rows).reshape(-1)  # past the end: dropped
            sums = jnp.zeros((rows, points.shape[1]), points.dtype)
            return sums.at[row].add(gradient.reshape(row.shape[0], -1), mode="drop")

        def visit(step: Any, total: jax.Array) -> jax.Array:
            return config.hop(total) + step_gradient(step)

        total = step_gradient(1)
        if config.hops > 1:
            total = lax.fori_loop(2, config.hops + 1, visit, total)
        return lax.psum(total, sums) if sums else total

    split = config.queries.spec
    mapped = _mapped(on_shard, config, (split, split), config.points.spec)
    gradient = mapped(index, gradients[1])
    return gradient, jnp.zeros_like(queries), jnp.zeros_like(limit)


search.defvjp(_forward, _backward)


def _share(candidates: Candidates, config: Search) -> Candidates:
    """Merge the candidates of the devices along `across` for the same queries."""
    devices = math.prod(config.mesh.shape[name] for name in config.across)
    rows = candidates.square.shape[0]
    slice_rows = -(-rows // devices)

    def exchange(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, slice_rows * devices - rows), *[(0, 0)] * (x.ndim - 1)))
        x = x.reshape(devices, slice_rows, *x.shape[1:])
        return lax.all_to_all(x, config.across, 0, 0)  # from each device, for this device's queries

    received = jax.tree.map(exchange, candidates)
    merged = jax.tree.map(lambda x: x[0], received)
    rest = jax.tree.map(lambda x: x[1:], received)
    merged, _ = lax.scan(lambda so_far, other: (merge(so_far, other), None), merged, rest)
    return jax.tree.map(lambda x: lax.all_gather(x, config.across, tiled=True)[:rows], merged)


def _table(rows: RowSplit) -> tuple[jax.Array, jax.Array]:
    """Where each block starts, and how many rows it has."""
    return jnp.array(rows.starts(), jnp.int32), jnp.array(rows.sizes, jnp.int32)


def _mapped(
    function: Callable[..., Any], config: Search, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    # What is merged is the same on every device of `across`, which the check cannot see.
    return jax.shard_map(
        function, mesh=config.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
