"""The search over devices: blocks of points go round a ring, what is found is merged.

Points are split over some mesh axes, queries over some, each perhaps over none:

- Along an axis that splits both, the blocks of points travel from device to device, n - 1 hops,
  while each device searches the block it has. Queries stay where they are.
- Along an axis that splits the points alone, every device searches its block for the same queries.
  Each then merges the findings for its slice of the queries (one all-to-all), and all gather the
  results.
- Along an axis that splits the queries alone, or neither, nothing is sent.

Backward, the gradients of the blocks travel round the same ring, in n - 1 hops, and each device
adds what its queries found there; along axes that split the queries alone they are summed.

What is found does not depend on the mesh: of points at equal distance, that of lower index is
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

from isoshard.core.blocks.ring import ring

from .nearest import Found, Tile, merge, nearest, nothing
from .row_splits import RowSplit


@dataclasses.dataclass(frozen=True)
class Search:
    """What is fixed about one search.

    Attributes:
        points: their split.
        queries: likewise, on the same mesh.
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
        """The axes that split the points alone, likewise."""
        alone = {*self.points.axes} - {*self.queries.axes}
        return tuple(name for name in self.mesh.axis_names if name in alone)

    @property
    def hops(self) -> int:
        """Devices in the ring."""
        return math.prod(self.mesh.shape[name] for name in self.ring)

    def block(self, place: Any) -> Any:
        """The number of a block of points, by its device's place in the ring."""
        at = {}
        for name in reversed(self.ring):
            at[name] = place % self.mesh.shape[name]
            place = place // self.mesh.shape[name]
        number = 0
        for name in self.points.axes:
            index = at[name] if name in at else lax.axis_index(name)
            number = number * self.mesh.shape[name] + index
        return number

    def hop(self, x: jax.Array) -> jax.Array:
        """Give what is here to the next device in the ring; get that of the one before."""
        pairs = [(device, (device + 1) % self.hops) for device in range(self.hops)]
        return lax.ppermute(x, self.ring, pairs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def search(
    how: Search, points: jax.Array, queries: jax.Array, limit: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Find the nearest points of each query.

    Args:
        how: the layouts and sizes.
        points: float[points, coordinates], with padding.
        queries: float[queries, coordinates], with padding.
        limit: float[], squared radius; points beyond it are not found.

    Returns:
        int32[queries, k] indices, -1 where nothing is found and in padding;
        float[queries, k, coordinates], where those points lie, else 0; int32[queries], how many
        points lie within the limit, or zeros if they are not counted. The points' gradient is that
        of indexing them; the search itself has none.
    """
    split = how.queries.spec
    starts, sizes = _table(how.points)
    _, rows = _table(how.queries)

    def here(block: jax.Array, mine: jax.Array, limit: jax.Array) -> Any:
        bound = limit if how.counted else None

        def look(state: Any, block: jax.Array, place: Any) -> Any:
            number = how.block(place)
            start, size = starts[number], sizes[number]
            found, count = nearest(block, start, size, mine, how.k, how.tile, bound)
            return merge(state[0], found), state[1] + count

        begin = nothing(mine, block.dtype, how.k), jnp.zeros(mine.shape[0], jnp.int32)
        if how.ring:
            found, count = ring(block, look, how.ring, carry=begin)
        else:
            found, count = look(begin, block, 0)
        if how.across:
            found, count = _share(found, how), lax.psum(count, how.across)
        number = lax.axis_index(how.queries.axes) if how.queries.axes else 0
        real = jnp.arange(mine.shape[0]) < rows[number]
        there = real[:, None] & (found.index >= 0) & (found.square <= limit)
        index = jnp.where(there, found.index, -1)
        return index, jnp.where(there[..., None], found.point, 0), jnp.where(real, count, 0)

    return _mapped(here, how, (how.points.spec, split, P()), (split, split, split))(
        points, queries, limit
    )


def _forward(how: Search, points: Any, queries: Any, limit: Any) -> Any:
    found: Any = search(how, points, queries, limit)
    return found, (found[0], points, queries, limit)


def _backward(how: Search, kept: Any, gradients: Any) -> Any:
    index, points, queries, limit = kept
    starts, _ = _table(how.points)
    blocks = math.prod(how.mesh.shape[name] for name in how.points.axes)
    rows = points.shape[0] // blocks
    sums = tuple(name for name in how.queries.axes if name not in how.points.axes)

    def here(index: jax.Array, gradient: jax.Array) -> jax.Array:
        place = lax.axis_index(how.ring) if how.ring else 0

        def part(step: Any) -> jax.Array:
            row = index - starts[how.block((place - step) % how.hops)]
            inside = (index >= 0) & (row >= 0) & (row < rows)
            row = jnp.where(inside, row, rows).reshape(-1)  # past the end: dropped
            whole = jnp.zeros((rows, points.shape[1]), points.dtype)
            return whole.at[row].add(gradient.reshape(row.shape[0], -1), mode="drop")

        def visit(step: Any, total: jax.Array) -> jax.Array:
            return how.hop(total) + part(step)

        total = part(1)
        if how.hops > 1:
            total = lax.fori_loop(2, how.hops + 1, visit, total)
        return lax.psum(total, sums) if sums else total

    split = how.queries.spec
    mapped = _mapped(here, how, (split, split), how.points.spec)
    gradient = mapped(index, gradients[1])
    return gradient, jnp.zeros_like(queries), jnp.zeros_like(limit)


search.defvjp(_forward, _backward)


def _share(found: Found, how: Search) -> Found:
    """Merge what the devices along `across` found for the same queries."""
    devices = math.prod(how.mesh.shape[name] for name in how.across)
    rows = found.square.shape[0]
    part = -(-rows // devices)

    def exchange(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, part * devices - rows), *[(0, 0)] * (x.ndim - 1)))
        x = x.reshape(devices, part, *x.shape[1:])
        return lax.all_to_all(x, how.across, 0, 0)  # from each device, for my slice of the queries

    theirs = jax.tree.map(exchange, found)
    mine = jax.tree.map(lambda x: x[0], theirs)
    rest = jax.tree.map(lambda x: x[1:], theirs)
    mine, _ = lax.scan(lambda so_far, one: (merge(so_far, one), None), mine, rest)
    return jax.tree.map(lambda x: lax.all_gather(x, how.across, tiled=True)[:rows], mine)


def _table(rows: RowSplit) -> tuple[jax.Array, jax.Array]:
    """Where each block starts, and how many rows it has."""
    return jnp.array(rows.starts(), jnp.int32), jnp.array(rows.sizes, jnp.int32)


def _mapped(function: Callable[..., Any], how: Search, given: Any, made: Any) -> Callable[..., Any]:
    # What is merged is the same on every device of `across`, which the check cannot see.
    return jax.shard_map(function, mesh=how.mesh, in_specs=given, out_specs=made, check_vma=False)
