"""How an array lies: which mesh axes split each of its axes, into blocks of how many rows.

>>> import jax.numpy as jnp
>>> from isoshard.core.mesh import make_mesh
>>> from isoshard.core.place import shard
>>> mesh = make_mesh((4,), ("x",))
>>> layout_of(shard(jnp.zeros((8, 3)), mesh, ("x", None))).sizes
((2, 2, 2, 2), (3,))
>>> uneven = UnevenArray(shard(jnp.zeros((8, 3)), mesh, ("x",)), (5, 3), ((2, 0, 1, 2), None))
>>> layout_of(uneven).sizes
((2, 0, 1, 2), (3,))

Inside `jax.jit` a value on Auto axes does not tell its layout, so it has to be said again.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.entries import entries_of
from isoshard.core.errors import ShardingError, UnevenError
from isoshard.core.mesh import as_mesh, mesh_of
from isoshard.core.spec import axis_names, named_sharding
from isoshard.core.uneven import UnevenArray


@dataclasses.dataclass(frozen=True)
class Layout:
    """How an array lies on a mesh.

    Attributes:
        mesh: the mesh.
        names: for each axis the mesh axes that split it, outermost first.
        sizes: for each axis the valid rows of its blocks.
        blocks: for each axis the rows of each block, valid or not.
        uneven: whether the array is an `UnevenArray`.
    """

    mesh: Mesh
    names: tuple[tuple[str, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    blocks: tuple[int, ...]
    uneven: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The true shape."""
        return tuple(map(sum, self.sizes))

    @property
    def sharding(self) -> NamedSharding:
        """The layout of the buffer."""
        return NamedSharding(self.mesh, P(*(names or None for names in self.names)))

    def manual(self, free: tuple[int, ...] = ()) -> tuple[P, set[str]]:
        """What `jax.shard_map` takes to run on the shards of all axes but the free ones.

        The compiler lays out by itself what is not named here; told less, it gathers a batch.
        """
        kept = [() if axis in free else names for axis, names in enumerate(self.names)]
        return P(*(names or None for names in kept)), {name for names in kept for name in names}

    def padded(self, axis: int) -> bool:
        """Whether some blocks along an axis are not full."""
        return any(size != self.blocks[axis] for size in self.sizes[axis])


def layout_of(
    x: Any, mesh: Mesh | None = None, spec: Any = None, *, verb: str = "this operator"
) -> Layout:
    """Find how an array lies.

    Args:
        x: a jax.Array or an UnevenArray, also traced.
        mesh: the mesh, if `x` is traced or shall be laid out anew.
        spec: the spec, likewise; any spelling.
        verb: what asks, for messages.

    Returns:
        The layout.

    Raises:
        ShardingError: there is no layout to read, or an UnevenArray's sizes are not one for each
            shard (UnevenError: an axis does not divide; SpecError: the spec does not fit).
        TypeError: `x` is no array of these kinds.

    Example:
        >>> import jax.numpy as jnp
        >>> layout_of(jnp.zeros(4), verb="halo_exchange")
        Traceback (most recent call last):
            ...
        isoshard.core.errors.ShardingError: halo_exchange: an array of shape (4,) lies on one device; lay it out with iso.shard(x, mesh, spec), or say how it shall lie: mesh=.., spec=..
    """  # noqa: E501
    array = x.array if isinstance(x, UnevenArray) else x
    if not isinstance(array, jax.Array):
        raise TypeError(
            f"{verb} takes a jax.Array or an UnevenArray, given was {type(x).__name__}; lay it out "
            "first: iso.shard(x, mesh, spec)"
        )
    sharding = _sharding(array, mesh, spec, verb)
    grid = mesh_of(sharding)
    names = tuple(map(axis_names, entries_of(sharding.spec)))
    names += ((),) * (array.ndim - len(names))
    counts = tuple(math.prod(grid.shape[name] for name in axes) for axes in names)
    given = x.sizes if isinstance(x, UnevenArray) else (None,) * array.ndim
    blocks, sizes, faults = [], [], []
    for axis, (rows, count, size) in enumerate(zip(array.shape, counts, given, strict=True)):
        if rows % count:
            faults.append(f"axis {axis} has size {rows}, which {count} shards do not divide")
        elif size is not None and len(size) != count:
            faults.append(f"axis {axis} has {len(size)} blocks, and {count} shards")
        sizes.append((rows // count,) * count if size is None else size)
        blocks.append(rows // count)
    if faults:
        raise UnevenError(
            f"{verb}: an array of shape {array.shape} does not lie as {sharding.spec}: "
            f"{'; '.join(faults)}. Give an iso.UnevenArray with one size for each shard."
        )
    return Layout(grid, names, tuple(sizes), tuple(blocks), isinstance(x, UnevenArray))


def _sharding(array: Any, mesh: Mesh | None, spec: Any, verb: str) -> NamedSharding:
    if isinstance(spec, NamedSharding) and mesh is None:
        mesh = mesh_of(spec)
    if spec is not None and mesh is not None:
        return named_sharding(spec, as_mesh(mesh), array.ndim, name=verb)
    if mesh is not None or spec is not None:
        raise ShardingError(f"{verb}: mesh and spec are given together, or neither")
    if isinstance(array, Tracer):
        raise ShardingError(
            f"{verb}: inside jax.jit a value does not tell how it lies; say it: mesh=.., spec=.."
        )
    if isinstance(array.sharding, NamedSharding):
        as_mesh(mesh_of(array.sharding))
        return array.sharding
    raise ShardingError(
        f"{verb}: an array of shape {array.shape} lies on one device; lay it out with "
        "iso.shard(x, mesh, spec), or say how it shall lie: mesh=.., spec=.."
    )
