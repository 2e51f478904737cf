"""A ring: each device sees every other's block once, and stores two at a time.

`ring` runs inside `jax.shard_map`. The next block travels while the body computes with this one:

>>> import jax
>>> import jax.numpy as jnp
>>> import numpy as np
>>> from jax.sharding import PartitionSpec as P
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> mesh = make_mesh((4,), ("x",))
>>> queries = shard(np.arange(8, dtype=np.float32), mesh, ("x",))
>>> points = queries * 10
>>> def nearest(points, queries):              # of all points, for this device's queries
...     def body(best, points, source):
...         return jnp.minimum(best, jnp.abs(queries[:, None] - points).min(1))
...     start = jnp.full_like(queries, jnp.inf)
...     return ring(points, body, "x", carry=start)
>>> shards = jax.shard_map(nearest, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x"))
>>> jax.jit(shards)(points, queries).tolist()
[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 4.0, 3.0]

Blocks of any sizes travel with their count of valid rows: `ring((block, size), ..)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from isoshard.core.errors import ShardingError

from .row_windows import Axes


def ring(
    x: Any,
    body: Callable[[Any, Any, jax.Array], Any],
    axis_name: Axes,
    *,
    carry: Any,
    reverse: bool = False,
) -> Any:
    """Pass blocks around, inside `jax.shard_map`; n devices, n - 1 sends of a block each.

    Each send is independent of the concurrent computation, so the compiler may overlap them. The
    backward pass goes around the other way; it keeps what `body` keeps of each block (wrap it in
    `jax.checkpoint` to compute again instead) and the blocks themselves.

    Args:
        x: this device's block: an array or a pytree of arrays.
        body: `body(carry, block, source) -> carry`; `source` is the index of the device that
            owns the block. It is called with this device's own block first.
        axis_name: the mesh axis, or axes, to go around; several count devices in the mesh's order.
        carry: of the first call; a pytree of arrays, whose shapes do not change.
        reverse: send to the device before instead of the one after.

    Returns:
        The last carry.

    Raises:
        ShardingError: `body` gives a carry of other shapes than it got.

    Example:
        >>> from isoshard.core.transfer.device_put import shard
        >>> def total(block):                      # on each device, the sum over all
        ...     body = lambda carry, block, source: carry + block
        ...     return ring(block, body, "x", carry=jnp.zeros_like(block))
        >>> x = shard([0.0, 1.0, 2.0, 3.0], jax.make_mesh((4,), ("x",)), jax.P("x"))
        >>> jax.jit(jax.shard_map(total, mesh=x.sharding.mesh, out_specs=jax.P("x")))(x)
        Array([6., 6., 6., 6.], dtype=float32)
    """
    axis_name = _in_mesh_order(axis_name)
    devices, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    step = -1 if reverse else 1
    pairs = [(device, (device + step) % devices) for device in range(devices)]

    def compute(carry: Any, block: Any, hop: Any) -> Any:
        return same_carry(body(carry, block, (index - step * hop) % devices), carry)

    def turn(state: tuple[Any, Any], hop: Any) -> tuple[tuple[Any, Any], None]:
        block, carry = state
        coming = lax.ppermute(block, axis_name, pairs)
        return (coming, compute(carry, block, hop)), None

    if devices == 1:
        return compute(carry, x, 0)
    # The first turn is outside the scan: the result of `body` may vary over devices where `carry`
    # does not yet, and a scan wants the same of all its turns.
    state, _ = turn((x, carry), 0)
    (block, carry), _ = lax.scan(turn, state, jnp.arange(1, devices - 1))
    return compute(carry, block, devices - 1)


def permute_blocks(x: Any, mesh: Mesh, axes: Axes, pairs: Iterable[tuple[int, int]]) -> Any:
    """`jax.lax.ppermute` by indices of blocks, inside `jax.shard_map`.

    `ppermute` itself counts devices in the mesh's order, and JAX 0.12 raises for axes in another.
    """
    names = (axes,) if isinstance(axes, str) else axes
    ordered = tuple(name for name in mesh.axis_names if name in names)
    devices = np.arange(math.prod(mesh.shape[name] for name in names))
    grid = devices.reshape([mesh.shape[name] for name in ordered])
    device = grid.transpose([ordered.index(name) for name in names]).reshape(-1).tolist()
    device_pairs = [(device[source], device[target]) for source, target in pairs]
    return lax.ppermute(x, ordered, device_pairs)


def _in_mesh_order(axes: Axes) -> Axes:
    """`ppermute` counts devices in the mesh's order, whatever that of the names."""
    if isinstance(axes, str):
        return axes
    return tuple(sorted(axes, key=jax.sharding.get_abstract_mesh().axis_names.index))


def same_carry(new: Any, old: Any, form: Callable[[Any], str] | None = None) -> Any:
    """Check that a carry keeps its structure, shapes and dtypes.

    Args:
        new: what `body` gave.
        old: what it got.
        form: dtype and shape of a leaf, as text; of arrays if not given.
    """
    forms = [jax.tree.map(form or _form, it) for it in (old, new)]
    if forms[0] != forms[1]:
        raise ShardingError(
            f"ring: body got the carry {forms[0]} and gave {forms[1]}; it must keep the structure, "
            "shapes and dtypes"
        )
    return new


def _form(leaf: Any) -> str:
    return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
