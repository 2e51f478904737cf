"""Collectives of a handler's devices, over JAX's.

Every verb takes mesh axes: a name, several, or none. Devices are counted in the order of the names
passed, as blocks are, and not in the mesh's order, in which `ppermute` counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from isoshard.core.kit import ShardingError, describe_mesh, keeping_nan, permute_blocks, ring

Axes = str | tuple[str, ...]

_REDUCTIONS: dict[str, Callable[[Any, tuple[str, ...]], Any]] = {
    "sum": lax.psum,
    "mean": lax.pmean,
    "max": lambda x, axes: jax.tree.map(lambda leaf: _extreme(leaf, axes, "max"), x),
    "min": lambda x, axes: jax.tree.map(lambda leaf: _extreme(leaf, axes, "min"), x),
}


class Verbs:
    """Communication inside a handler.

    Attributes:
        mesh: the devices.
    """

    mesh: Mesh

    def count(self, axes: Axes) -> int:
        """How many devices, so how many blocks, there are along mesh axes."""
        return math.prod(self.mesh.shape[name] for name in self._names(axes))

    def index(self, axes: Axes) -> Any:
        """The index of this device, so of its block, along mesh axes: int32[]."""
        names = self._names(axes)
        return lax.axis_index(names) if names else jnp.zeros((), jnp.int32)

    def all_reduce(self, x: Any, axes: Axes, op: str = "sum") -> Any:
        """Add up, or compare, what the devices have; every one gets the result.

        Args:
            x: an array or a tree of them.
            axes: of the mesh.
            op: "sum", "mean", "max" or "min". The gradient of the last two goes to the elements
                that are it, in equal parts.

        Returns:
            The same shapes. A ring sends 2 (n - 1) / n of the bytes per device.

        Raises:
            ShardingError: an axis is not of the mesh, or `op` is another.
        """
        if op not in _REDUCTIONS:
            raise ShardingError(
                f"all_reduce: op {op!r} is none of {', '.join(map(repr, _REDUCTIONS))}"
            )
        names = self._names(axes)
        return _REDUCTIONS[op](x, names) if names else x

    def all_gather(self, x: Any, axes: Axes, axis: int = 0) -> Any:
        """Concatenate the blocks of all devices; every device gets the result.

        Args:
            x: an array or a tree of them; padding included.
            axes: of the mesh.
            axis: of the array.

        Returns:
            n times as many elements along `axis`; each device receives n - 1 blocks.

        Raises:
            ShardingError: an axis is not of the mesh.
        """
        names = self._names(axes)
        return lax.all_gather(x, names, axis=axis, tiled=True) if names else x

    def permute(self, x: Any, axes: Axes, hop: int = 1) -> Any:
        """Send to the device `hop` further on a ring; receive from the one `hop` before.

        Args:
            x: an array or a tree of them.
            axes: of the mesh.
            hop: how far; negative numbers send back.

        Returns:
            The same shapes.

        Raises:
            ShardingError: an axis is not of the mesh.
        """
        names = self._names(axes)
        if not names:
            return x
        count = self.count(names)
        pairs = [(block, (block + hop) % count) for block in range(count)]
        return permute_blocks(x, self.mesh, names, pairs)

    def ring(
        self,
        x: Any,
        body: Callable[[Any, Any, Any], Any],
        axes: Axes,
        *,
        carry: Any,
        reverse: bool = False,
    ) -> Any:
        """Rotate the blocks while the body computes, as `iso.domain.ring`.

        Args:
            x: this device's block: an array or a tree of them.
            body: `body(carry, block, source) -> carry`; `source` is the index of the block, int32.
            axes: of the mesh.
            carry: of the first call; shapes do not change.
            reverse: the other way round.

        Returns:
            The last carry, after n calls and n - 1 sends.

        Raises:
            ShardingError: an axis is not of the mesh, or a carry has other shapes.
        """
        names = self._names(axes)
        if not names:
            return body(carry, x, jnp.zeros((), jnp.int32))
        block_indices = jnp.asarray(self._block_indices(names), jnp.int32)

        def visit(carry: Any, block: Any, source: Any) -> Any:
            return body(carry, block, block_indices[source])

        return ring(x, visit, self._in_order(names), carry=carry, reverse=reverse)

    def _names(self, axes: Axes) -> tuple[str, ...]:
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        unknown = [name for name in names if name not in self.mesh.axis_names]
        if unknown:
            raise ShardingError(
                f"no mesh axis is called {', '.join(map(repr, unknown))}; the mesh axes are "
                f"{describe_mesh(self.mesh)}"
            )
        return names

    def _in_order(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in self.mesh.axis_names if name in names)

    def _block_indices(self, names: tuple[str, ...]) -> np.ndarray:
        """The index of each device along `names`, devices in the order of the mesh."""
        grid = np.arange(self.count(names)).reshape([self.mesh.shape[name] for name in names])
        return grid.transpose([names.index(name) for name in self._in_order(names)]).reshape(-1)


def _extreme(x: Any, axes: tuple[str, ...], op: str) -> Any:
    """The maximum or minimum over devices; `pmax` and `pmin` have no derivative in JAX."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return _differentiable(axes, op, x)
    return _over_devices(axes, op, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _differentiable(axes: tuple[str, ...], op: str, x: Any) -> Any:
    return _over_devices(axes, op, x)


def _over_devices(axes: tuple[str, ...], op: str, x: Any) -> Any:
    reduce = lax.pmax if op == "max" else lax.pmin
    return keeping_nan(lambda x: reduce(x, axes), x, least=op == "min")


@_differentiable.defjvp
def _(axes: tuple[str, ...], op: str, primals: Any, tangents: Any) -> Any:
    (x,), (change,) = primals, tangents
    extreme = _differentiable(axes, op, x)
    chosen = x == extreme
    count = lax.psum(chosen.astype(x.dtype), axes)
    return extreme, lax.psum(jnp.where(chosen, change, 0), axes) / count
