"""Products and convolutions of integers, exact on every platform.

XLA's compiler for TPU rewrites 64-bit types as pairs of 32-bit ones, and has no such rewriting for
a product of matrices nor a convolution; that for CUDA has convolutions of 8-bit integers at most.
Where one is missing, it is multiplied out and summed, which both have; elsewhere it is what it was.
The platform is static when a program is lowered, so other platforms' programs are unaffected.

>>> a, b = jnp.arange(6).reshape(2, 3), jnp.arange(3) - 1
>>> print(_summed_product(a, b), matmul(a, b))
[2 2] [2 2]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def on_every_platform(
    usual: Callable[..., jax.Array], summed: Callable[..., jax.Array], *operands: jax.Array
) -> jax.Array:
    """A product as it is, or multiplied out and summed where there is no such product."""
    if not _are(operands, np.int64, np.uint64):
        return usual(*operands)
    return lax.platform_dependent(*operands, tpu=summed, default=usual)


def _are(operands: Sequence[jax.Array], *kinds: Any) -> bool:
    return all(any(jnp.issubdtype(x.dtype, kind) for kind in kinds) for x in operands)


def matmul(a: jax.Array, b: jax.Array, **options: Any) -> jax.Array:
    """`jnp.matmul`.

    Args:
        a: of any rank.
        b: likewise.
        options: of `jnp.matmul`.
    """
    return on_every_platform(lambda a, b: jnp.matmul(a, b, **options), _summed_product, a, b)


def _summed_product(a: jax.Array, b: jax.Array) -> jax.Array:
    rows = a[None] if a.ndim == 1 else a
    columns = b[:, None] if b.ndim == 1 else b
    out = jnp.sum(rows[..., :, :, None] * columns[..., None, :, :], axis=-2)
    out = out[..., 0] if b.ndim == 1 else out
    return out[..., 0] if a.ndim == b.ndim == 1 else out[..., 0, :] if a.ndim == 1 else out


def dot_general(
    a: jax.Array, b: jax.Array, axes: Any, *, preferred_element_type: Any = None
) -> jax.Array:
    """`lax.dot_general`.

    Args:
        a: of any rank.
        b: likewise.
        axes: as there: those that are contracted, and those of the batch.
        preferred_element_type: as there.
    """
    return on_every_platform(
        lambda a, b: lax.dot_general(a, b, axes, preferred_element_type=preferred_element_type),
        lambda a, b: _summed_dot(a, b, axes),
        *(a, b),
    )


def _summed_dot(a: jax.Array, b: jax.Array, axes: Any) -> jax.Array:
    (over_a, over_b), (batch_a, batch_b) = axes
    free_a = [axis for axis in range(a.ndim) if axis not in {*over_a, *batch_a}]
    free_b = [axis for axis in range(b.ndim) if axis not in {*over_b, *batch_b}]
    batch, count = [a.shape[axis] for axis in batch_a], len(over_a)
    rows, columns = [a.shape[axis] for axis in free_a], [b.shape[axis] for axis in free_b]
    terms = [a.shape[axis] for axis in over_a]
    a = a.transpose(*batch_a, *free_a, *over_a).reshape(*batch, *rows, *[1] * len(columns), *terms)
    b = b.transpose(*batch_b, *free_b, *over_b).reshape(*batch, *[1] * len(rows), *columns, *terms)
    return jnp.sum(a * b, axis=tuple(range(-count, 0))) if count else a * b


def convolution(
    x: jax.Array,
    weight: jax.Array,
    *,
    feature_group_count: int,
    dimension_numbers: Any,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    rhs_dilation: Sequence[int],
    lhs_dilation: Sequence[int] | None = None,
    **options: Any,
) -> jax.Array:
    """`lax.conv_general_dilated` with these options.

    Args:
        x: images.
        weight: the kernel.
        feature_group_count: as there, and likewise the others.
        dimension_numbers: None for batch and channels first.
        window_strides: one per spatial axis.
        padding: one pair per spatial axis.
        rhs_dilation: of the kernel.
        lhs_dilation: of the images; None for none.
        options: the others.
    """
    steps = lhs_dilation or (1,) * (x.ndim - 2)

    def usual(x: jax.Array, weight: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x,
            weight,
            window_strides,
            padding,
            lhs_dilation,
            rhs_dilation,
            dimension_numbers,
            feature_group_count,
            **options,
        )

    def summed(x: jax.Array, weight: jax.Array) -> jax.Array:
        out = options.get("preferred_element_type") or x.dtype
        x, weight = x.astype(out), weight.astype(out)
        dimensions = lax.conv_dimension_numbers(x.shape, weight.shape, dimension_numbers)
        x, weight = x.transpose(dimensions.lhs_spec), weight.transpose(dimensions.rhs_spec)
        edges = [(0, 0, 0)] * 2
        edges += [(*pair, step - 1) for pair, step in zip(padding, steps, strict=True)]
        x = lax.pad(x, jnp.zeros((), x.dtype), edges)
        taps = _summed_taps(x, weight, window_strides, rhs_dilation, feature_group_count)
        return taps.transpose(np.argsort(dimensions.out_spec))

    if _are((x, weight), np.integer) and not _are((x, weight), np.int64, np.uint64):
        return lax.platform_dependent(x, weight, cuda=summed, default=usual)
    if _are((x, weight), np.integer):
        return lax.platform_dependent(x, weight, tpu=summed, cuda=summed, default=usual)
    return usual(x, weight)


def _summed_taps(
    x: jax.Array, weight: jax.Array, strides: Sequence[int], dilation: Sequence[int], groups: int
) -> jax.Array:
    """The convolution of padded images: one product for each element of the kernel.

    Args:
        x: (batch, channels, *space).
        weight: (out, channels / groups, *kernel).
        strides: one per spatial axis.
        dilation: likewise.
        groups: of channels.
    """
    batch, channels, *space = x.shape
    features, _, *kernel = weight.shape
    counts = [
        max(0, (size - (taps - 1) * gap - 1) // stride + 1)
        for size, taps, gap, stride in zip(space, kernel, dilation, strides, strict=True)
    ]
    total = jnp.zeros((batch, groups, features // groups, *counts), x.dtype)
    for tap in itertools.product(*map(range, kernel)):
        offsets = [
            slice(at * gap, at * gap + stride * (count - 1) + 1, stride) if count else slice(0)
            for at, gap, stride, count in zip(tap, dilation, strides, counts, strict=True)
        ]
        seen = x[(slice(None), slice(None), *offsets)]
        seen = seen.reshape(batch, groups, 1, channels // groups, *counts)
        factor = weight[(slice(None), slice(None), *tap)].reshape(
            1, groups, features // groups, channels // groups, *(1 for _ in counts)
        )
        total = total + jnp.sum(seen * factor, axis=3, dtype=x.dtype)
    return total.reshape(batch, features, *counts)
