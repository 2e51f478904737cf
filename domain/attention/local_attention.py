"""The per-device program of an attention whose sharding the compiler chose; axes as torch's.

>>> import functools
>>> import jax
>>> from isoshard.core.layout.mesh import make_mesh
>>> from .partitioned_attention import Attention
>>> mesh = make_mesh((4,), ("x",))
>>> static = Attention(False, 1.0)
>>> places = AttentionAxes((), None, None, rows=(), columns=("x",))
>>> part = LocalAttention(static, mesh, places, 2, 8, None)  # 2 queries, keys on four devices
>>> specs = [layout.spec for layout in (*part.shardings[:2], part.shardings[3])]
>>> attend = jax.shard_map(part.forward, mesh=mesh, in_specs=(*specs[:2], specs[1], None),
...                        out_specs=(specs[0], specs[2]), check_vma=False)
>>> k = jnp.arange(8.0)[:, None]
>>> jax.jit(attend)(jnp.zeros((2, 1)), k, k, None)[0].tolist()  # scores are equal: the mean of v
[[3.5], [3.5]]
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from isoshard.core.kit import dot_product_attention_wide as wide
from isoshard.core.kit import finite, key_of

from . import ring_passes
from .attention_axes import AttentionAxes, fold, fold_mask, heads_of, spec_of_leaf
from .positions import Positions
from .setup import Axes, Extras, Setup, count
from .zigzag import ordered, zigzagged

if TYPE_CHECKING:
    from .partitioned_attention import Attention


@dataclasses.dataclass(frozen=True)
class LocalAttention:
    """What every device computes.

    Attributes:
        static: the attention's static arguments.
        mesh: the devices.
        axes: the mesh axes that split each axis.
        queries: the global length of that sequence.
        keys: likewise.
        mask: the global shape of the mask; None without one.
        samples: the global sizes of the axes before the heads.
        wants_mask: whether the mask's gradient is computed.
    """

    static: Attention
    mesh: Mesh
    axes: AttentionAxes
    queries: int
    keys: int
    mask: tuple[int, ...] | None
    samples: tuple[int, ...] = ()
    wants_mask: bool = False

    @property
    def shardings(self) -> tuple[NamedSharding, NamedSharding, Any, NamedSharding]:
        """Of queries, of keys, of the mask (or of each of its leaves), of one value per query."""

        def sharding(spec: Any) -> NamedSharding:
            return NamedSharding(self.mesh, spec)

        of_mask = None if self.mask is None else sharding(self.axes.spec_of_mask(self.mask))
        if of_mask is not None and self.static.mask is not None:
            of_mask = tuple(
                sharding(spec_of_leaf(of_mask.spec, shape)) for shape in self.static.mask.leaves
            )
        rows, columns, per_query = (
            sharding(self.axes.spec_of(which)) for which in ("q", "k", "log")
        )
        return rows, columns, of_mask, per_query

    def forward(
        self, q: Any, k: Any, v: Any, mask: Any, key_data: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        """Attend; of shards, gives shards."""
        if self._unsplit:
            return self.static.unsharded(q, k, v, mask, key_data, self._sample_indices(key_data, q))
        setup, blocks = self._setup, self._blocks
        extras = self._extras(self._fold_mask(mask, q), key_data, q)
        rows, columns, values = (self._to(fold(x), 1) for x in (q, k, v))
        out, log = ring_passes.forward(setup, rows, columns, values, extras, blocks)
        if blocks is not None and self.axes.columns:
            out, log = _combined(out, log, self.axes.columns)
        out, log = self._back(out, 1), self._back(log, 2)
        out = out.swapaxes(1, 2).reshape(*q.shape[:-1], v.shape[-1])
        return out.astype(q.dtype), log.reshape(q.shape[:-1])

    def backward(
        self,
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        mask: Any,
        log: Any,
        delta: Any,
        key_data: Any = None,
    ) -> tuple[jax.Array, ...]:
        """The gradients of queries, keys, values, and of the mask if `wants_mask`."""
        qkv, axes = (q, k, v), self.axes
        if self._unsplit:
            options = (log, delta, self.wants_mask, key_data, self._sample_indices(key_data, q))
            grads: list[Any] = [*self.static.unsharded_gradients(dout, *qkv, mask, *options)]
        else:
            grads = self._tiled_backward(dout, q, k, v, mask, log, delta, key_data)
            if not axes.is_ring:
                grads[0] = _sum(grads[0], axes.columns)
                grads[1:3] = (_sum(x, axes.rows) for x in grads[1:3])
        few = axes.key_heads or ()
        rest = tuple(name for name in axes.heads or () if name not in few)
        grads[1:3] = (_sum(x, rest) for x in grads[1:3])
        grads[:3] = (x.astype(like.dtype) for x, like in zip(grads, qkv, strict=False))
        if not self.wants_mask or self.mask is None:
            return tuple(grads[:3])
        return *grads[:3], _sum(grads[3], axes.shared(self.mask)).astype(mask.dtype)

    def _tiled_backward(self, dout, q, k, v, mask, log, delta, key_data) -> list[Any]:
        setup, blocks = self._setup, self._blocks
        rows, columns, values, dout_rows = (self._to(fold(x), 1) for x in (q, k, v, dout))
        log, delta = (self._to(x.reshape(-1, heads_of(q), x.shape[-1]), 2) for x in (log, delta))
        folded, unfold = None, None
        if self.wants_mask:
            added = mask.astype(wide(q.dtype))
            folded, unfold = jax.vjp(lambda mask: self._fold_mask(mask, q), added)
        elif mask is not None:
            folded = self._fold_mask(mask, q)
        extras = self._extras(folded, key_data, q)
        *grads, of_mask = ring_passes.backward(
            setup, rows, columns, values, extras, dout_rows, log, delta, self.wants_mask, blocks
        )
        grads = [self._back(x, 1).swapaxes(1, 2).reshape(like.shape)
                 for x, like in zip(grads, (q, k, v), strict=True)]  # fmt: skip
        if unfold is not None:
            (of_mask,) = unfold(of_mask)
        return [*grads, of_mask]

    @property
    def _unsplit(self) -> bool:
        return not self.axes.rows and not self.axes.columns

    @property
    def _mask_rotates(self) -> bool:
        """Whether the columns of the mask are split as their keys."""
        if self.mask is None or self.mask[-1] == 1:
            return False
        return not self.axes.is_ring or self.mask[-2] == 1

    @property
    def _balanced(self) -> bool:
        """Whether sequences are brought in zigzag order, so that all have as much to do."""
        slices = 2 * count(self.mesh, self.axes.rows)
        even = self.queries % slices == self.keys % slices == 0
        has_rows = self.mask is not None and self.mask[-2] > 1
        return self.axes.is_ring and self.static.causal and even and not has_rows

    @property
    def _setup(self) -> Setup:
        ring = self.axes.rows if self.axes.is_ring else ()
        return Setup(
            mesh=self.mesh,
            ring=ring,
            batch=(),
            heads=(),
            queries=self._line(self.queries, self.axes.rows),
            keys=self._line(self.keys, self.axes.columns),
            causal=self.static.causal,
            scale=self.static.scale,
            rate=self.static.rate,
            tile=self.static.tile,
            mask_rotates=self._mask_rotates,
        )

    def _line(self, length: int, axes: Axes) -> Positions:
        """A sequence in blocks as XLA makes them: of one size, the last ones smaller or empty."""
        blocks = count(self.mesh, axes)
        block = -(-length // blocks)
        sizes = [min(max(length - block * i, 0), block) for i in range(blocks)]
        uneven = tuple(sizes) if length % blocks else None
        return Positions(block * blocks, blocks, self._balanced, uneven)

    @property
    def _blocks(self) -> ring_passes.Blocks | None:
        """The block indices of this device's queries and keys, outside a ring."""
        if self.axes.is_ring:
            return None
        rows, columns = self.axes.rows, self.axes.columns
        return _axis_index(rows), _axis_index(columns)

    def _extras(self, mask: Any, key_data: Any, q: Any) -> Extras:
        if key_data is None:
            return Extras(mask)
        return Extras(mask, key=key_of(key_data), indices=self._sample_indices(key_data, q))

    def _sample_indices(self, key_data: Any, q: Any) -> tuple[jax.Array, jax.Array] | None:
        """Global indices of this device's samples and heads, for dropout.

        They are int32[batch] and int32[heads].
        """
        if key_data is None:
            return None
        samples = jnp.zeros((1,), jnp.int32)
        for axis, (extent, axes) in enumerate(zip(self.samples, self.axes.lead, strict=True)):
            samples = (samples[:, None] * extent + _global_indices(axes, q.shape[axis])).reshape(-1)
        return samples, _global_indices(self.axes.heads or (), heads_of(q))

    def _to(self, x: jax.Array, dim: int) -> jax.Array:
        return zigzagged(self.mesh, self.axes.rows, dim, x) if self._balanced else x

    def _back(self, x: jax.Array, dim: int) -> jax.Array:
        return ordered(self.mesh, self.axes.rows, dim, x) if self._balanced else x

    def _fold_mask(self, mask: Any, q: Any) -> jax.Array | None:
        if mask is None or self.static.mask is not None:
            return self.static.mask_of(mask) if mask is not None else None
        mask = fold_mask(mask, q.shape)
        return self._to(mask, 3) if self._mask_rotates else mask


def _axis_index(axes: Axes) -> jax.Array | int:
    """The index of this device's block along mesh axes."""
    return jax.lax.axis_index(axes) if axes else 0


def _global_indices(axes: Axes, size: int) -> jax.Array:
    """Global indices of the `size` elements that this device has along mesh axes."""
    return _axis_index(axes) * size + jnp.arange(size)


def _sum(x: jax.Array, axes: Axes) -> jax.Array:
    return jax.lax.psum(x, axes) if axes else x


def _combined(out: jax.Array, log: jax.Array, axes: Axes) -> tuple[jax.Array, jax.Array]:
    """Combine results for the same queries and different keys over devices along `axes`."""
    top = jax.lax.pmax(log, axes)
    level = finite(top)
    share = jnp.exp(log - level)
    total = jax.lax.psum(share, axes)
    weighted = jax.lax.psum(out * share.swapaxes(1, 2)[..., None], axes)
    out = weighted / jnp.where(total == 0, 1, total).swapaxes(1, 2)[..., None]
    return out, level + jnp.log(total)
