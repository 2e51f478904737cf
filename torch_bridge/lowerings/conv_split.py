"""Convolutions of images that are split over devices along a spatial axis.

XLA's partitioner exchanges halos for a plain convolution of such images. It is wrong, or ends the
process, for others: dilated, grouped or transposed ones, kernels that are split themselves, results
that are split along channels as well, and the gradient of a weight where only a part of the mesh is
used. In programs with such layouts (`partition().images`) kernels are kept whole, but for their
input channels, images too for the convolutions that cannot be split, and where only a part of the
mesh is used (`partition().partly`) the gradient of a weight is a product per element of the kernel,
which is partitioned right:

    gradient[o, i, k] = sum over n, s of image[n, i, s * stride + k * dilation] * grad[n, o, s]
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .program_partition import partition
from .unsharded_axes import constrained


def kernel_whole(kernel: jax.Array, inputs: int | None) -> jax.Array:
    """A kernel in a layout that the partitioner treats rightly, where a program splits images.

    Args:
        kernel: as it is handed to XLA's convolution.
        inputs: the axis of its input channels, which may be split; None if it may not.
    """
    if not partition().images:
        return kernel
    spec: list[object] = [None] * kernel.ndim
    if inputs is not None:
        spec[inputs] = PartitionSpec.UNCONSTRAINED
    return _constrain(kernel, spec)


def batch_split(x: jax.Array) -> jax.Array:
    """Images that are whole, but for their batch, where a program splits images.

    The constraint holds for the gradient of `x` too.
    """
    if not partition().images:
        return x
    return _constrain(x, (PartitionSpec.UNCONSTRAINED, *(None,) * (x.ndim - 1)))


def _constrain(x: jax.Array, spec: Sequence[object]) -> jax.Array:
    mesh = partition().mesh
    assert mesh is not None  # images are split
    return constrained(x, NamedSharding(mesh, PartitionSpec(*spec)))


def weight_gradient(
    image: jax.Array,
    grad: jax.Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> jax.Array:
    """The gradient of the weight of a plain convolution.

    Args:
        image: what was convolved, (batch, in, *space).
        grad: gradient of the result, (batch, out, *space).
        kernel: sizes of the kernel.
        stride: one per spatial axis; likewise the next two.
        padding: on both sides.
        dilation: between the elements of the kernel.
        groups: of channels that do not see each other.

    Returns:
        Gradient of the weight, (out, in / groups, *kernel).
    """
    count, out, *size = grad.shape
    edges = [(0, 0), (0, 0), *((p, p) for p in padding)]
    image = jnp.pad(image, edges)
    image = image.reshape(count, groups, -1, *image.shape[2:])
    grad = grad.reshape(count, groups, out // groups, *size)

    space = "xyz"[: len(size)]
    equation = f"ngi{space},ngo{space}->goi"

    def at(place: tuple[int, ...]) -> jax.Array:
        first = [k * d for k, d in zip(place, dilation, strict=True)]
        last = [f + (n - 1) * s + 1 for f, n, s in zip(first, size, stride, strict=True)]
        lead = image.shape[:3]
        seen = lax.slice(image, (0, 0, 0, *first), (*lead, *last), (1, 1, 1, *stride))
        return jnp.einsum(equation, seen, grad, preferred_element_type=_sums(image))

    places = itertools.product(*(range(k) for k in kernel))
    taps = jnp.stack([at(place) for place in places], axis=-1)
    return taps.reshape(out, image.shape[2], *kernel).astype(grad.dtype)


def _sums(x: jax.Array):
    return jnp.float32 if x.dtype.itemsize < 4 else x.dtype
