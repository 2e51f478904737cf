"""Attention partitioned when it is compiled, by its operands' shardings: in a ring where needed.

For a compiler that decides layouts itself, as under a captured step of torch, where
no argument names the mesh axes that split a sequence. What each device does:

- if queries and keys are split by the same mesh axes, those are a ring, as in `ring_attention`;
- if they are split by different ones, or only one of them is, each device attends with its queries
to its keys, and an all-reduce combines results, not scores;
- if neither is, the attention of full sequences (`isoshard.core.nn.dot_product_attention`), tile
  by tile if they are long (`blockwise`).

A mask may be a `TiledMask`: its leaves are operands, each split as the axes that it has.

Dropout drops the same weights wherever they are computed (`dropout.keep`).

Under a causal mask queries and keys of a ring are brought in zigzag order and the result back,
where twice the devices divide both lengths and the mask has no rows.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> x = shard(jax.random.normal(jax.random.key(0), (1, 2, 64, 8)), make_mesh((4,), ("x",)),
...           (None, None, "x"))
>>> attend = Attention(False, 1.0)
>>> text = jax.jit(lambda x: attend(x, x, x)[0]).lower(x).compile().as_text()
>>> "collective-permute" in text, "all-gather" in text
(True, False)
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.kit import (
    MaskFunction,
    Rule,
    TiledMask,
    attend,
    gains,
    gradients,
    partitioned,
    products,
    summed_to,
)

from . import blockwise, kernels
from .attention_axes import attention_axes
from .local_attention import LocalAttention


@dataclasses.dataclass(frozen=True)
class Attention:
    """The static arguments of an attention, as the compiler gets them.

    Attributes:
        causal: a query sees the keys up to its own position.
        scale: of the scores.
        tile: queries and keys, at most, whose scores exist at once where a sequence is split.
        rate: the share of weights that is dropped, at least 0 and below 1.
        mask: how a mask follows from its leaves, which are operands in its stead; else None.
        platform: "tpu", "gpu" or "cpu": the target, whose kernel is used for long sequences.
        interpret: whether Pallas kernels are interpreted, for tests without a TPU.
        is_global: whether it is computed on global arrays, for a partitioner: with all scores,
            whose axes it can follow, and without kernels.
    """

    causal: bool
    scale: float
    tile: int = 512
    rate: float = 0.0
    mask: MaskFunction | None = None
    platform: str = "cpu"
    interpret: bool = False
    is_global: bool = False

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: jax.Array | TiledMask | None = None,
        key_data: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Attend.

        Args:
            q: (.., heads, queries, width).
            k: (.., key heads, keys, width); `heads` is a multiple of `key heads`.
            v: (.., key heads, keys, width of values).
            mask: broadcasts to (.., heads, queries, keys); of bool, True is visible; of floats, it
                is added to the scores. A `TiledMask` takes q of four axes.
            key_data: uint32[2], the key of dropout (`dropout.words_of`); None if nothing is
                dropped.

        Returns:
            (.., heads, queries, width of values), of the dtype of `q`, and (.., heads, queries),
            the logarithms of the sums of exponentials, in at least float32.
        """
        static, mask = self._with_leaves(mask)
        return _attend(static, q, k, v, mask, key_data)

    def gradients(
        self,
        dout: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: jax.Array | TiledMask | None,
        log: jax.Array,
        delta: jax.Array,
        wants_mask: bool = False,
        key_data: jax.Array | None = None,
    ) -> tuple[jax.Array | None, ...]:
        """The gradients of q, k, v, and of an added mask if `wants_mask`."""
        call = _mask_gradients if wants_mask else _gradients
        static, mask = self._with_leaves(mask)
        grads = call(static, dout, q, k, v, mask, log, delta, key_data)
        return tuple(grads) if wants_mask else (*grads, None)

    def unsharded(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: Any = None,
        key_data: jax.Array | None = None,
        indices: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Attend on unsplit sequences; `indices` are those that `gains` takes."""
        mask = self.mask_of(mask)
        kernel = self._kernel(q, k, v, mask)
        if kernel is not None:
            out, log = kernel.forward(q, k, v)
        elif self.is_tiled(q, k, mask):
            out, log = blockwise.forward(self, q, k, v, mask, key_data, indices)
        else:
            out, log = attend(q, k, v, mask, **self._options(q, k, key_data, indices))
        return out.astype(q.dtype), log

    def unsharded_gradients(
        self,
        dout: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: Any,
        log: jax.Array,
        delta: jax.Array | None = None,
        wants_mask: bool = False,
        key_data: jax.Array | None = None,
        indices: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[jax.Array | None, ...]:
        """`gradients` on unsplit sequences; in at least float32.

        Where no tiles are used, `delta` may be None; it is then computed of unrounded values.
        """
        mask = self.mask_of(mask)
        kernel = self._kernel(q, k, v, mask)
        if kernel is not None and not wants_mask:
            return *kernel.backward(dout, q, k, v, log), None
        if delta is not None and self.is_tiled(q, k, mask):
            rest = (log, delta, wants_mask, key_data, indices)
            return blockwise.backward(self, dout, q, k, v, mask, *rest)
        options = self._options(q, k, key_data, indices)
        *grads, dscores = gradients(dout, q, k, v, mask, delta=delta, **options)
        return *grads, summed_to(dscores, mask.shape) if wants_mask and mask is not None else None

    def is_tiled(self, q: jax.Array, k: jax.Array, mask: Any) -> bool:
        """Whether scores exist one tile at a time, where neither sequence is split."""
        if self.is_global:
            return False
        is_long = blockwise.is_long(q.shape[-2], k.shape[-2], self.platform)
        return is_long or isinstance(mask, TiledMask)

    def _kernel(self, q: Any, k: Any, v: Any, mask: Any) -> kernels.Kernel | None:
        return kernels.kernel_of(self, q, k, v, mask) if self.is_tiled(q, k, mask) else None

    def mask_of(self, operand: Any) -> Any:
        """The mask of the operand that is in its stead."""
        if self.mask is None:
            return operand
        mask = TiledMask(self.mask, tuple(operand))
        return mask.dense() if self.is_global else mask

    def _with_leaves(self, mask: Any) -> tuple[Attention, Any]:
        """These arguments for operands that are arrays, and the operand for a mask."""
        if not isinstance(mask, TiledMask):
            return self, mask
        return dataclasses.replace(self, mask=mask.function), mask.leaves

    def _options(self, q: Any, k: Any, key_data: Any, indices: Any) -> dict[str, Any]:
        each = gains(key_data, self.rate, (*q.shape[:-1], k.shape[-2]), indices)
        return {"scale": self.scale, "causal": self.causal, "gains": each}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Attention, q, k, v, mask, key_data):
    return _results(static, q, k, v, mask, key_data)


def _attend_forward(static: Attention, q, k, v, mask, key_data):
    out, log = _results(static, q, k, v, mask, key_data)
    return (out, log), (q, k, v, mask, key_data, out, log)


def _attend_backward(static: Attention, saved, cotangents):
    q, k, v, mask, key_data, out, log = saved
    dout, dlog = cotangents
    delta = products(out, dout) - dlog  # a weight is the gradient of the logarithm of its row
    is_array = mask is not None and static.mask is None
    added = is_array and jnp.issubdtype(mask.dtype, jnp.floating)
    return *static.gradients(dout, q, k, v, mask, log, delta, added, key_data), None


_attend.defvjp(_attend_forward, _attend_backward)


def _of_global_arrays(static: Attention) -> Attention:
    """For the function that `custom_partitioning` takes, which has no constants, as kernels have.

    It is not what a device computes, but what shardings propagate through.
    """
    return dataclasses.replace(static, is_global=True)


def _unsharded(static: Attention, q, k, v, mask, key_data):
    return _of_global_arrays(static).unsharded(q, k, v, mask, key_data)


def _unsharded_gradients(
    static: Attention, dout, q, k, v, mask, log, delta, key_data, of_mask=False
):
    portable = _of_global_arrays(static)
    grads = portable.unsharded_gradients(dout, q, k, v, mask, log, delta, of_mask, key_data)
    pairs = zip(grads, (q, k, v, mask), strict=True)
    return tuple(x.astype(like.dtype) for x, like in pairs if x is not None)


def _unsharded_mask_gradients(static: Attention, *operands):
    return _unsharded_gradients(static, *operands, of_mask=True)


def _split(static: Attention, mesh: Mesh, operands, results):
    q, k, v, mask, key_data = operands
    local = LocalAttention(
        static, mesh, attention_axes(mesh, (q, *results), (k, v)), *_sizes(static, q, k, mask)
    )
    rows, columns, of_mask, per_query = local.shardings
    replicated = _replicated(mesh, key_data)
    return mesh, local.forward, (rows, per_query), (rows, columns, columns, of_mask, replicated)


def _split_gradients(static: Attention, mesh: Mesh, operands, results):
    dout, q, k, v, mask, log, _, key_data = operands
    dq, dk, dv, *dmask = results
    axes = attention_axes(mesh, (q, dout, dq, log), (k, v, dk, dv))
    local = LocalAttention(static, mesh, axes, *_sizes(static, q, k, mask), bool(dmask))
    rows, columns, of_mask, per_query = local.shardings
    out = (rows, columns, columns, of_mask)[: len(results)]
    need = (
        rows,
        rows,
        columns,
        columns,
        of_mask,
        per_query,
        per_query,
        _replicated(mesh, key_data),
    )
    return mesh, local.backward, out, need


def _replicated(mesh: Mesh, key_data):
    return None if key_data is None else NamedSharding(mesh, P())


def _sizes(static: Attention, q, k, mask):
    of_mask = None if mask is None else tuple(static.mask_of(mask).shape)
    return q.shape[-2], k.shape[-2], of_mask, tuple(q.shape[:-3])


def _rule(static: Attention, shapes: tuple[tuple[int, ...], ...]) -> Rule:
    """`b h l d, b h s d, b h s e -> b h l e, b h l`, with as many axes as there are."""
    (queries, keys, _, *mask), key_axes = _without_key(static, shapes)
    letters = _Letters(queries, keys)
    operands = [
        letters.rows("d"),
        letters.columns("d"),
        letters.columns("e"),
        *map(letters.mask, mask),
    ]
    operands += key_axes
    return f"{', '.join(operands)} -> {letters.rows('e')}, {letters.rows()}", letters.sizes


def _gradients_rule(static: Attention, shapes: tuple[tuple[int, ...], ...], of_mask=False) -> Rule:
    (_, queries, keys, _, *mask, _, _), key_axes = _without_key(static, shapes)
    letters = _Letters(queries, keys)
    masks = list(map(letters.mask, mask))
    operands = [
        letters.rows("e"),
        letters.rows("d"),
        letters.columns("d"),
        letters.columns("e"),
        *masks,
    ]
    results = [letters.rows("d"), letters.columns("d"), letters.columns("e"), *(masks * of_mask)]
    operands += [letters.rows(), letters.rows(), *key_axes]
    return f"{', '.join(operands)} -> {', '.join(results)}", letters.sizes


def _without_key(static: Attention, shapes: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[str]]:
    """The shapes before the key of dropout, which comes last, and the name of its axis."""
    return (shapes[:-1], ["words"]) if static.rate else (shapes, [])


class _Letters:
    """Names for the axes of an attention's operands; equal names are sharded identically."""

    def __init__(self, queries: tuple[int, ...], keys: tuple[int, ...]) -> None:
        self.lead = [f"b{axis}" for axis in range(len(queries) - 3)]
        self.heads, self.key_heads = [["h"] if len(queries) > 2 else []] * 2
        self.sizes: dict[str, int] = {}
        for heads, few in zip(queries[-3:-2], keys[-3:-2], strict=True):
            if few == 1 < heads:
                self.key_heads = ["shared"]
            elif few < heads:
                self.heads, self.sizes = ["(h g)"], {"g": heads // few}

    def rows(self, width: str = "") -> str:
        return " ".join([*self.lead, *self.heads, "l", *width])

    def columns(self, width: str) -> str:
        return " ".join([*self.lead, *self.key_heads, "s", width])

    def mask(self, shape: tuple[int, ...]) -> str:
        names = [*self.lead, *self.heads, "l", "s"][-len(shape) :]
        named = zip(names, shape, strict=True)
        return " ".join(f"one{n}" if m == 1 else name for n, (name, m) in enumerate(named))


_results = partitioned(_unsharded, _split, _rule)
_gradients = partitioned(_unsharded_gradients, _split_gradients, _gradients_rule)
_mask_gradients = partitioned(
    _unsharded_mask_gradients, _split_gradients, functools.partial(_gradients_rule, of_mask=True)
)
