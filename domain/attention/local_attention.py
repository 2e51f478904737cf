"""One device's share of an attention whose layout the compiler has found; axes as torch's.

>>> import functools
>>> import jax
>>> from isoshard.core.layout.mesh import make_mesh
>>> from .partitioned_attention import Attention
>>> mesh = make_mesh((4,), ("x",))
>>> static = Attention(False, 1.0)
>>> places = Places((), None, None, rows=(), columns=("x",))
>>> part = LocalAttention(static, mesh, places, 2, 8, None)  # 2 queries, keys on four devices
>>> specs = [layout.spec for layout in (*part.layouts[:2], part.layouts[3])]
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

from isoshard.core.nn.dot_product_attention import finite, wide
from isoshard.core.nn.dropout import key_of

from . import ring_passes
from .attention_axes import Places, fold, fold_mask, heads_of
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
        places: the mesh axes that split each axis.
        queries: the length of that sequence, in all.
        keys: likewise.
        mask: the shape of the mask, in all; None without one.
        samples: how many samples there are along each axis before the heads, in all.
        wants_mask: whether the mask's gradient is computed.
    """

    static: Attention
    mesh: Mesh
    places: Places
    queries: int
    keys: int
    mask: tuple[int, ...] | None
    samples: tuple[int, ...] = ()
    wants_mask: bool = False

    @property
    def layouts(self) -> tuple[NamedSharding, NamedSharding, NamedSharding | None, NamedSharding]:
        """Of queries, of keys, of the mask, and of one number per query."""

        def laid(spec: Any) -> NamedSharding:
            return NamedSharding(self.mesh, spec)

        of_mask = None if self.mask is None else laid(self.places.spec_of_mask(self.mask))
        rows, columns, one = (laid(self.places.spec_of(which)) for which in ("q", "k", "log"))
        return rows, columns, of_mask, one

    def forward(
        self, q: Any, k: Any, v: Any, mask: Any, words: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        """Attend; of shards, gives shards."""
        if self._whole:
            return self.static.whole(q, k, v, mask, words, self._numbers(words, q))
        setup, blocks = self._setup, self._blocks
        extras = self._extras(self._fold_mask(mask, q), words, q)
        rows, columns, values = (self._to(fold(x), 1) for x in (q, k, v))
        out, log = ring_passes.forward(setup, rows, columns, values, extras, blocks)
        if blocks is not None and self.places.columns:
            out, log = _together(out, log, self.places.columns)
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
        words: Any = None,
    ) -> tuple[jax.Array, ...]:
        """The gradients of queries, keys, values, and of the mask if it is wanted."""
        given, places = (q, k, v), self.places
        if self._whole:
            options = (delta, self.wants_mask, words, self._numbers(words, q))
            found: list[Any] = [*self.static.whole_gradients(dout, *given, mask, *options)]
        else:
            found = self._tiled_backward(dout, q, k, v, mask, log, delta, words)
            if not places.around:
                found[0] = _sum(found[0], places.columns)
                found[1:3] = (_sum(x, places.rows) for x in found[1:3])
        few = places.key_heads or ()
        rest = tuple(name for name in places.heads or () if name not in few)
        found[1:3] = (_sum(x, rest) for x in found[1:3])
        found[:3] = (x.astype(like.dtype) for x, like in zip(found, given, strict=False))
        if not self.wants_mask or self.mask is None:
            return tuple(found[:3])
        return *found[:3], _sum(found[3], places.shared(self.mask)).astype(mask.dtype)

    def _tiled_backward(self, dout, q, k, v, mask, log, delta, words) -> list[Any]:
        setup, blocks = self._setup, self._blocks
        rows, columns, values, slopes = (self._to(fold(x), 1) for x in (q, k, v, dout))
        log, delta = (self._to(x.reshape(-1, heads_of(q), x.shape[-1]), 2) for x in (log, delta))
        folded, unfold = None, None
        if self.wants_mask:
            added = mask.astype(wide(q.dtype))
            folded, unfold = jax.vjp(lambda mask: self._fold_mask(mask, q), added)
        elif mask is not None:
            folded = self._fold_mask(mask, q)
        extras = self._extras(folded, words, q)
        *found, of_mask = ring_passes.backward(
            setup, rows, columns, values, extras, slopes, log, delta, self.wants_mask, blocks
        )
        found = [self._back(x, 1).swapaxes(1, 2).reshape(like.shape)
                 for x, like in zip(found, (q, k, v), strict=True)]  # fmt: skip
        if unfold is not None:
            (of_mask,) = unfold(of_mask)
        return [*found, of_mask]

    @property
    def _whole(self) -> bool:
        return not self.places.rows and not self.places.columns

    @property
    def _riding(self) -> bool:
        """Whether the columns of the mask are split as their keys."""
        if self.mask is None or self.mask[-1] == 1:
            return False
        return not self.places.around or self.mask[-2] == 1

    @property
    def _balanced(self) -> bool:
        """Whether sequences are brought in zigzag order, so that all have as much to do."""
        parts = 2 * count(self.mesh, self.places.rows)
        even = self.queries % parts == self.keys % parts == 0
        has_rows = self.mask is not None and self.mask[-2] > 1
        return self.places.around and self.static.causal and even and not has_rows

    @property
    def _setup(self) -> Setup:
        ring = self.places.rows if self.places.around else ()
        return Setup(
            mesh=self.mesh,
            ring=ring,
            batch=(),
            heads=(),
            queries=self._line(self.queries, self.places.rows),
            keys=self._line(self.keys, self.places.columns),
            causal=self.static.causal,
            scale=self.static.scale,
            rate=self.static.rate,
            tile=self.static.tile,
            riding=self._riding,
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
        """The numbers of this device's queries and keys where they are in no ring."""
        if self.places.around:
            return None
        rows, columns = self.places.rows, self.places.columns
        return _number(rows), _number(columns)

    def _extras(self, mask: Any, words: Any, q: Any) -> Extras:
        if words is None:
            return Extras(mask)
        return Extras(mask, key=key_of(words), numbers=self._numbers(words, q))

    def _numbers(self, words: Any, q: Any) -> tuple[jax.Array, jax.Array] | None:
        """Which samples and heads of the whole this device has, if any weights are dropped.

        They are int32[batch] and int32[heads].
        """
        if words is None:
            return None
        samples = jnp.zeros((1,), jnp.int32)
        for axis, (extent, axes) in enumerate(zip(self.samples, self.places.lead, strict=True)):
            samples = (samples[:, None] * extent + _those(axes, q.shape[axis])).reshape(-1)
        return samples, _those(self.places.heads or (), heads_of(q))

    def _to(self, x: jax.Array, dim: int) -> jax.Array:
        return zigzagged(self.mesh, self.places.rows, dim, x) if self._balanced else x

    def _back(self, x: jax.Array, dim: int) -> jax.Array:
        return ordered(self.mesh, self.places.rows, dim, x) if self._balanced else x

    def _fold_mask(self, mask: Any, q: Any) -> jax.Array | None:
        if mask is None:
            return None
        mask = fold_mask(mask, q.shape)
        return self._to(mask, 3) if self._riding else mask


def _number(axes: Axes) -> jax.Array | int:
    """Of this device's block along mesh axes."""
    return jax.lax.axis_index(axes) if axes else 0


def _those(axes: Axes, size: int) -> jax.Array:
    """The numbers, in the whole, of the `size` that this device has along mesh axes."""
    return _number(axes) * size + jnp.arange(size)


def _sum(x: jax.Array, axes: Axes) -> jax.Array:
    return jax.lax.psum(x, axes) if axes else x


def _together(out: jax.Array, log: jax.Array, axes: Axes) -> tuple[jax.Array, jax.Array]:
    """Results of the same queries for different keys, on devices along `axes`, as one."""
    top = jax.lax.pmax(log, axes)
    level = finite(top)
    share = jnp.exp(log - level)
    total = jax.lax.psum(share, axes)
    weighted = jax.lax.psum(out * share.swapaxes(1, 2)[..., None], axes)
    out = weighted / jnp.where(total == 0, 1, total).swapaxes(1, 2)[..., None]
    return out, level + jnp.log(total)
