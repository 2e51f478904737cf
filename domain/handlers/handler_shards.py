"""Shards: the shardings of a handler's arguments, and its collectives.

A handler runs on every device at once, inside `jax.shard_map`, with that device's blocks of the
arrays. `Shards` has their shardings. It names an array by its position among the
arguments, by its keyword, or by the block itself as the handler got it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from isoshard.core.kit import ArrayLayout, ShardingError

from .results import ResultLayout
from .verbs import Verbs

Which = Any  # a position, a keyword, a path of these into a nested argument, or the block itself


class Shards(Verbs):
    """The shardings of a call's arrays; created for each call.

    Args:
        mesh: the devices.
        layouts: of each array, by its path: (position or keyword, keys of nested arguments ..).
        blocks: likewise, this device's.

    Attributes:
        mesh: the devices, under Auto axes; abstract where only the type of a traced array has it.

    Example:
        >>> import jax
        >>> from isoshard.domain import register_function_handler
        >>> from isoshard.core.transfer.device_put import shard
        >>> def handler(shards, x):                     # `shards` is a Shards, `x` a block of two
        ...     names = shards.axes(x, 0)
        ...     return shards.all_reduce(x.max(), names, "max"), P()
        >>> largest = register_function_handler(jnp.max, handler)
        >>> largest(shard(np.arange(8, dtype=np.float32), jax.make_mesh((4,), ("x",)), ("x",)))
        Array(7., dtype=float32)
    """

    def __init__(
        self,
        mesh: Mesh,
        layouts: dict[tuple[Any, ...], ArrayLayout],
        blocks: dict[tuple[Any, ...], Any],
    ) -> None:
        """Store them."""
        self.mesh = mesh
        self._layouts = layouts
        self._blocks = blocks

    @property
    def specs(self) -> dict[Any, P]:
        """The spec of each array, by position or keyword; by path inside a nested argument."""
        return {
            path[0] if len(path) == 1 else path: self._spec(layout)
            for path, layout in self._layouts.items()
        }

    def spec(self, arg: Which) -> P:
        """The spec of an array: which mesh axes split each of its axes."""
        return self._spec(self._layout(arg))

    def shape(self, arg: Which) -> tuple[int, ...]:
        """The true shape of the global array."""
        return self._layout(arg).shape

    def axes(self, arg: Which, dim: int) -> tuple[str, ...]:
        """The mesh axes that split an axis of an array, outermost first; none if it is not split.

        Args:
            arg: which array.
            dim: its axis; negative numbers count from the end.

        Returns:
            Names, as every verb takes them.

        Raises:
            ShardingError: there is no such array or axis.
        """
        layout, dim = self._axis(arg, dim)
        return layout.names[dim]

    def sizes(self, arg: Which, dim: int) -> tuple[int, ...]:
        """How many rows of each block along an axis are valid; one number per block."""
        layout, dim = self._axis(arg, dim)
        return layout.sizes[dim]

    def size(self, arg: Which, dim: int) -> Any:
        """How many rows of this device's block are valid: int32[]."""
        layout, dim = self._axis(arg, dim)
        return jnp.asarray(layout.sizes[dim], jnp.int32)[self.index(layout.names[dim])]

    def start(self, arg: Which, dim: int) -> Any:
        """The global index of the first row of this device's block: int32[]."""
        starts = jnp.asarray(self.starts(arg, dim), jnp.int32)
        return starts[self.index(self.axes(arg, dim))]

    def starts(self, arg: Which, dim: int) -> tuple[int, ...]:
        """The global index of the first row of each block."""
        sizes = self.sizes(arg, dim)
        return tuple((np.cumsum(sizes) - np.array(sizes)).tolist())

    def valid(self, arg: Which, dim: int) -> Any:
        """Which rows of this device's block are data: bool[rows]; the others are zero."""
        layout, dim = self._axis(arg, dim)
        rows = jnp.arange(layout.blocks[dim], dtype=jnp.int32)
        return rows < self.size(arg, dim)

    def like(self, arg: Which, *dims: int | None) -> ResultLayout:
        """The sharding of a result whose axes are split as an argument's, with its valid sizes.

        Args:
            arg: which array.
            *dims: for each axis of the result the axis of the argument, or None for one that is
                replicated.

        Returns:
            What to return as the spec. Rows of the result that are not valid become zeros.

        Raises:
            ShardingError: there is no such array or axis.
        """
        layout = self._layout(arg)
        axes = [None if dim is None else self._axis(arg, dim)[1] for dim in dims]
        split = [None if dim is None or not self._in_blocks(layout, dim) else dim for dim in axes]
        return ResultLayout(
            P(*(None if dim is None else layout.names[dim] or None for dim in split)),
            tuple(
                layout.sizes[dim] if dim is not None and layout.uneven else None for dim in split
            ),
            tuple(None if dim is None else layout.blocks[dim] for dim in split),
        )

    def uneven(self, spec: Any, sizes: Sequence[Sequence[int] | None]) -> ResultLayout:
        """The sharding of a result of whose blocks not every row is valid.

        Args:
            spec: which mesh axes split it; any spelling.
            sizes: per axis None, or the valid rows of each block, which come first.

        Returns:
            What to return as the spec.
        """
        return ResultLayout(spec, tuple(sizes))

    def _layout(self, arg: Which) -> ArrayLayout:
        return self._layouts[self._key(arg)]

    def _key(self, arg: Which) -> tuple[Any, ...]:
        named = isinstance(arg, int | str | tuple)
        path = (arg if isinstance(arg, tuple) else (arg,)) if named else self._path(arg)
        if path not in self._layouts:
            present = ", ".join(repr(p[0] if len(p) == 1 else p) for p in self._layouts)
            raise ShardingError(
                f"shards has the arrays of the call as the handler got them: {present}; "
                f"got {repr(arg) if named else 'an array computed from others'}"
            )
        return path

    def _path(self, block: Any) -> tuple[Any, ...]:
        paths = (path for path, array in self._blocks.items() if array is block)
        return next(paths, ("",))

    def _axis(self, arg: Which, dim: int) -> tuple[ArrayLayout, int]:
        layout = self._layout(arg)
        ndim = len(layout.names)
        if not -ndim <= dim < ndim:
            raise ShardingError(
                f"an array of shape {layout.shape} has axes 0 to {ndim - 1}; got {dim}"
            )
        return layout, dim % ndim

    @staticmethod
    def _in_blocks(layout: ArrayLayout, dim: int) -> bool:
        return bool(layout.names[dim]) or layout.padded(dim)

    @staticmethod
    def _spec(layout: ArrayLayout) -> P:
        entries = [names[0] if len(names) == 1 else names or None for names in layout.names]
        while entries and not entries[-1]:
            entries.pop()
        return P(*entries)
