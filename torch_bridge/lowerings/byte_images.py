"""Images of bytes, resized as torch does: in integers, and rounded after each axis.

Weights become integers of up to 16 bits (ATen/native/cpu/UpSampleKernel.cpp): as many bits
behind the point as the largest weight leaves room for, 22 at most.

>>> halfway = np.array([[1, 0], [0.5, 0.5], [0, 1]])
>>> resize(jnp.array([[0, 100]], jnp.uint8), [None, halfway]).tolist()
[[0, 50, 100]]
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

_MOST_BITS = 22  # as ATen/native/cpu/UpSampleKernel.cpp, so that int16 weights and products fit


def resize(images: jax.Array, matrices: Sequence[np.ndarray | None]) -> jax.Array:
    """Images of bytes with another size.

    Args:
        images: uint8, whose last axes are those of space.
        matrices: for each of these the weights of its elements, `(outputs, elements)`; None for one
            that is unchanged.

    Returns:
        uint8. The last axis is resized first.
    """
    axes = range(images.ndim - len(matrices), images.ndim)
    for axis, matrix in reversed([*zip(axes, matrices, strict=True)]):
        if matrix is not None:
            images = _along(images, axis, matrix)
    return images


def _along(images: jax.Array, axis: int, matrix: np.ndarray) -> jax.Array:
    bits = _bits(float(matrix.max(initial=0)))
    scaled = matrix * 2.0**bits
    weights = np.trunc(scaled + np.where(scaled < 0, -0.5, 0.5)).astype(np.int32)
    sums = jnp.tensordot(images.astype(jnp.int32), weights, axes=(axis, 1))
    rounded = jnp.right_shift(sums + (1 << (bits - 1) if bits else 0), bits)
    return jnp.moveaxis(jnp.clip(rounded, 0, 255), -1, axis).astype(jnp.uint8)


def _bits(largest: float) -> int:
    """How many fractional bits a weight has."""
    bits = 0
    while bits < _MOST_BITS and int(0.5 + largest * 2.0 ** (bits + 1)) < 1 << 15:
        bits += 1
    return bits
