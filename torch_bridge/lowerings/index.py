"""Reading by index arrays, and filling by mask.

>>> from isoshard.torch_bridge.lowerings import registry
>>> gather = registry.find(torch.ops.aten.gather.default).function
>>> gather(jnp.array([[1.0, 2.0], [3.0, 4.0]]), 1, jnp.array([[1], [0]]))
Array([[2.],
       [3.]], dtype=float32)

An index out of range is an error in torch; here it reads NaN (of integers the smallest, of unsigned
ones the largest, of bools True), since a compiled program cannot raise. So do values that are
missing for the indices of a mask. A mask as an index has no shape that a compiler could know: the
engine converts it to indices first, except where a mask only chooses what to overwrite.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch

from .argument_forms import as_scalar, at_least_1d, axis, index_dtype
from .argument_forms import in_bounds_indices as narrowed
from .index_updates import leading
from .program_partition import partition
from .registry import lower
from .unsharded_axes import unsharded

_COMPARE_ALL = 128  # boundaries up to which comparing with each is cheaper than a search


def along(index: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    """Places along an axis of `x`, in 32 bits where it is no longer."""
    return narrowed(index, x.shape[axis])


def index_arrays(
    x: jax.Array, indices: Sequence[jax.Array | None]
) -> tuple[jax.Array | slice, ...]:
    """aten's list of indices of `x` for JAX: None is a full slice; shapes follow NumPy's rule."""
    result, axis = [], 0
    for index in indices:
        if index is not None and index.dtype in (bool, jnp.uint8):  # a mask
            result.append(index.astype(bool))
            axis += index.ndim
            continue
        result.append(slice(None) if index is None else along(index, x, axis))
        axis += 1
    return tuple(result)


@lower(
    "aten::index.Tensor",
    "aten::_unsafe_index.Tensor",
    "aten::index.Tensor_hacked_twin",
    "aten::_unsafe_index.Tensor_hacked_twin",
)
def index(x: jax.Array, indices: Sequence[jax.Array | None]) -> jax.Array:
    """`x[indices]`."""
    at = index_arrays(x, indices)
    mesh = partition().mesh
    if mesh is not None and sum(n > 1 for n in mesh.shape.values()) > 1 and len(at) < x.ndim + 1:
        # XLA's partitioner fails where an index of several axes and the slices are both split.
        at = tuple(i if isinstance(i, slice) else unsharded(i, range(i.ndim)) for i in at)
    return x.at[at].get(mode="fill")


@lower("aten::_unsafe_masked_index")
def masked_index(
    x: jax.Array, mask: jax.Array, indices: Sequence[jax.Array | None], fill: complex
) -> jax.Array:
    """`x[indices]` where the mask is set, else `fill`."""
    rows = x.at[index_arrays(x, indices)].get(mode="clip")
    return jnp.where(mask.astype(bool), rows, as_scalar(fill, x.dtype))


@lower("aten::gather")
def gather(x: jax.Array, dim: int, index: jax.Array, *, sparse_grad: bool = False) -> jax.Array:
    """The elements of `x` at `index` along `dim`, at their own positions along other axes."""
    array = at_least_1d(x)
    lead = axis(dim, array.ndim)
    at = along(at_least_1d(index), array, lead)
    if at.size == 0:
        return jnp.zeros(index.shape, x.dtype)
    limits = [n if d == lead else at.shape[d] for d, n in enumerate(array.shape)]
    cropped = leading(array, limits)
    return jnp.take_along_axis(cropped, at, axis=lead).reshape(index.shape)


@lower("aten::index_select")
def index_select(x: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    """The slices of `x` along an axis at a list of indices."""
    if x.ndim == 0:
        return x
    return jnp.take(x, along(at_least_1d(index), x, dim), axis=dim)


@lower("aten::take")
def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Elements of the flat form of `x`."""
    return x.reshape(-1).at[narrowed(index, x.size)].get(mode="fill")


@lower("aten::masked_scatter")
def masked_scatter(x: jax.Array, mask: jax.Array, source: jax.Array) -> jax.Array:
    """`x` with the masked elements replaced by those of `source`, in order."""
    mask = mask.astype(bool)
    mask = jnp.broadcast_to(mask, jnp.broadcast_shapes(mask.shape, x.shape))
    x = jnp.broadcast_to(x, mask.shape)
    if source.size == 0:
        return x
    return jnp.where(mask, source.reshape(-1).at[order(mask)].get(mode="fill"), x)


@lower("aten::masked_scatter_backward")
def masked_scatter_backward(
    grad_output: jax.Array, mask: jax.Array, sizes: Sequence[int]
) -> jax.Array:
    """The gradient of the source: the masked gradients in order, then zeros."""
    mask = jnp.broadcast_to(mask.astype(bool), grad_output.shape)
    kept = jnp.where(mask, grad_output, as_scalar(0, grad_output.dtype))
    flat = jnp.zeros(max(1, _count(sizes)), grad_output.dtype).at[order(mask)].add(kept)
    return flat[: _count(sizes)].reshape(tuple(sizes))


def order(mask: jax.Array) -> jax.Array:
    """For each element of a mask, how many masked elements precede it."""
    count = jnp.cumsum(mask.reshape(-1), dtype=index_dtype(mask.size))
    return jnp.maximum(count - 1, 0).reshape(mask.shape)


def _count(sizes: Sequence[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


@lower("aten::searchsorted.Tensor")
def searchsorted(
    sorted_sequence: jax.Array,
    values: jax.Array,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: jax.Array | None = None,
) -> jax.Array:
    """The insertion index of each value in a sorted sequence, one per row or one for all."""
    if sorter is not None:
        sorted_sequence = jnp.take_along_axis(sorted_sequence, sorter, axis=-1)
    side = side or ("right" if right else "left")
    with jax.numpy_dtype_promotion("standard"):
        common = jnp.promote_types(sorted_sequence.dtype, values.dtype)
    rows, values = sorted_sequence.astype(common), values.astype(common)

    def search_row(row: jax.Array, value: jax.Array) -> jax.Array:
        method = "compare_all" if row.shape[-1] <= _COMPARE_ALL else "scan"
        return jnp.searchsorted(row, value, side=side, method=method)

    for _ in range(rows.ndim - 1):
        search_row = jax.vmap(search_row)
    return search_row(rows, values)


@lower("aten::searchsorted.Scalar")
def searchsorted_scalar(
    sorted_sequence: jax.Array,
    value: jax.Array | float,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: jax.Array | None = None,
) -> jax.Array:
    """The insertion index of a scalar in a sorted sequence."""
    value = jnp.asarray(value)
    return searchsorted(sorted_sequence, value, right=right, side=side, sorter=sorter)


def _bucket_shape(
    x: float, boundaries: torch.Tensor, *, out_int32: bool = False, right: bool = False
) -> torch.Tensor:
    """Torch 2.10 decomposes it by the scalar's value."""
    return boundaries.new_empty((), dtype=torch.int32 if out_int32 else torch.int64)


@lower("aten::bucketize.Scalar", meta=_bucket_shape)
@lower("aten::bucketize.Tensor")
def bucketize(
    x: jax.Array | float, boundaries: jax.Array, *, out_int32: bool = False, right: bool = False
) -> jax.Array:
    """The bucket between sorted boundaries that each value falls in."""
    return searchsorted(boundaries, jnp.asarray(x), right=right)


@lower("aten::nonzero_static")
def nonzero_static(x: jax.Array, *, size: int, fill_value: int = -1) -> jax.Array:
    """Indices of the first `size` nonzero elements, a row each; then rows of `fill_value`."""
    return jnp.argwhere(x, size=size, fill_value=fill_value)
