"""The layout of an array: which mesh axes split each of its axes, into blocks of how many rows.

>>> import jax.numpy as jnp
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> mesh = make_mesh((4,), ("x",))
>>> layout_of(shard(jnp.zeros((8, 3)), mesh, ("x", None))).sizes
((2, 2, 2, 2), (3,))
>>> uneven = UnevenArray(shard(jnp.zeros((8, 3)), mesh, ("x",)), (5, 3), ((2, 0, 1, 2), None))
>>> layout_of(uneven).sizes
((2, 0, 1, 2), (3,))

Inside `jax.jit` a value on Auto axes has no sharding, so the caller passes it again; an
`UnevenArray` has one there, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError, UnevenError
from isoshard.core.layout.mesh import as_mesh
from isoshard.core.layout.spec import axis_names, named_sharding
from isoshard.core.layout.spec_entries import entries_of
from isoshard.core.layout.uneven import UnevenArray, padded_of
from isoshard.core.runtime._jax_internals.tracers import Tracer

from .interpreting import recording
from .traced_shardings import block_sizes, sharding_of


@dataclasses.dataclass(frozen=True)
class ArrayLayout:
    """The layout of an array on a mesh.

    Attributes:
        mesh: the mesh.
        names: for each axis the mesh axes that split it, outermost first.
        sizes: for each axis the valid rows of its blocks.
        blocks: for each axis the rows of each block, valid or not.
        uneven: whether the array is an `UnevenArray`.
        open: the axes of unknown sharding; they are left to the compiler.
    """

    mesh: Mesh
    names: tuple[tuple[str, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    blocks: tuple[int, ...]
    uneven: bool
    open: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The true shape."""
        return tuple(map(sum, self.sizes))

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of the buffer."""
        return self.sharding_but()

    def sharding_but(
        self, free: tuple[int, ...] = (), closed: tuple[int, ...] = ()
    ) -> NamedSharding:
        """The sharding of a buffer; free axes are left to the compiler, closed ones never are."""
        entries: list[Any] = [names or None for names in self.names]
        for axis in {*self.open, *free} - set(closed):
            entries[axis] = P.UNCONSTRAINED
        return NamedSharding(self.mesh, P(*entries))

    def opened(self, axes: Sequence[int]) -> ArrayLayout:
        """The same with some axes, unless padded, left to the compiler."""
        axes = [axis for axis in axes if not self.padded(axis)]
        names = tuple(() if axis in axes else split_by for axis, split_by in enumerate(self.names))
        sizes = tuple((sum(s),) if a in axes else s for a, s in enumerate(self.sizes))
        blocks = tuple(sum(s) if a in axes else self.blocks[a] for a, s in enumerate(self.sizes))
        free = tuple(sorted({*self.open, *axes}))
        return dataclasses.replace(self, names=names, sizes=sizes, blocks=blocks, open=free)

    def wrap(self, array: Any, shape: Sequence[int], sizes: Any) -> UnevenArray:
        """An array of this layout; a traced one needs its sharding recorded."""
        sharding = self.sharding if isinstance(array, Tracer) else None
        return UnevenArray(array, shape, sizes, sharding)

    def manual(self, free: tuple[int, ...] = ()) -> tuple[P, set[str]]:
        """Specs and mesh axes for `jax.shard_map` over the shards of all axes but the free ones.

        The compiler shards the other axes. Without these specs, it gathers a batch.
        """
        split_by = [() if axis in free else names for axis, names in enumerate(self.names)]
        return P(*(names or None for names in split_by)), {
            name for names in split_by for name in names
        }

    @property
    def buffer(self) -> tuple[int, ...]:
        """The shape of the buffer, padding included."""
        pairs = zip(self.sizes, self.blocks, strict=True)
        return tuple(len(sizes) * block for sizes, block in pairs)

    def padded(self, axis: int) -> bool:
        """Whether some blocks along an axis are not full."""
        return any(size != self.blocks[axis] for size in self.sizes[axis])


def layout_of(
    x: Any, mesh: Any = None, spec: Any = None, *, verb: str = "this operator"
) -> ArrayLayout:
    """Find the layout of an array.

    Raises:
        ShardingError: there is no sharding to read, or an UnevenArray's sizes are not one for each
            shard (UnevenError: an axis does not divide; SpecError: the spec does not fit).
        TypeError: `x` is no array of these kinds.

    Example:
        >>> import jax.numpy as jnp
        >>> layout_of(jnp.zeros(4), verb="halo_exchange")
        Traceback (most recent call last):
            ...
        isoshard.core.errors.ShardingError: halo_exchange: an array of shape (4,) is on one device; shard it with iso.shard(x, mesh, spec), or pass mesh=.., spec=..
    """  # noqa: E501
    array = padded_of(x)
    if not isinstance(array, jax.Array):
        raise TypeError(
            f"{verb} takes a jax.Array or an UnevenArray, got {type(x).__name__}; shard it "
            "first: iso.shard(x, mesh, spec)"
        )
    sharding = _sharding(x, mesh, spec, verb)
    grid: Any = sharding.mesh
    entries = entries_of(sharding.spec)
    names = tuple(map(axis_names, entries))
    names += ((),) * (array.ndim - len(names))
    counts = tuple(math.prod(grid.shape[name] for name in axes) for axes in names)
    valid = x.sizes if isinstance(x, UnevenArray) else (None,) * array.ndim
    blocks = tuple(rows // count for rows, count in zip(array.shape, counts, strict=True))
    errors: list[str] = []
    sizes = tuple(
        block_sizes(f"axis {axis}", rows, count, size, errors)
        for axis, (rows, count, size) in enumerate(zip(array.shape, counts, valid, strict=True))
    )
    if errors:
        raise UnevenError(
            f"{verb}: an array of shape {array.shape} cannot be sharded as {sharding.spec}: "
            f"{'; '.join(errors)}. Give an iso.UnevenArray with one size for each shard."
        )
    free = tuple(axis for axis, entry in enumerate(entries) if entry is P.UNCONSTRAINED)
    return ArrayLayout(grid, names, sizes, blocks, isinstance(x, UnevenArray), free)


def lifted(x: Any, mesh: Any, spec: Any) -> bool:
    """Whether `x` stands for an array of its shape in a function that is being lifted.

    There an operator needs no sharding of `x`: it is known when the function is run.
    """
    return recording() and isinstance(x, Tracer) and mesh is None and spec is None


def unsplit_layout(shape: Sequence[int]) -> ArrayLayout:
    """The layout of an array that no mesh axis splits, on any devices."""
    empty = Mesh(np.empty((), object), ())
    sizes = tuple((int(size),) for size in shape)
    return ArrayLayout(empty, ((),) * len(sizes), sizes, tuple(map(sum, sizes)), False)


def _sharding(x: Any, mesh: Any, spec: Any, verb: str) -> NamedSharding:
    if isinstance(spec, NamedSharding) and mesh is None:
        mesh = spec.mesh
    if spec is not None and mesh is not None:
        return named_sharding(spec, as_mesh(mesh, abstract=True), x.ndim, name=verb)
    if mesh is not None or spec is not None:
        raise ShardingError(f"{verb}: pass mesh and spec together, or neither")
    sharding = sharding_of(x)
    if sharding is None:
        raise ShardingError(
            f"{verb}: inside jax.jit a value has no sharding; pass mesh=.., spec=.."
        )
    if isinstance(sharding, NamedSharding):
        return sharding
    raise ShardingError(
        f"{verb}: an array of shape {x.shape} is on one device; shard it with "
        "iso.shard(x, mesh, spec), or pass mesh=.., spec=.."
    )
