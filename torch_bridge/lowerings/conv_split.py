"""Convolutions of images that are split over devices along a spatial axis.

XLA's partitioner exchanges halos for a plain convolution of such images. It is wrong, or ends the
process, for others: dilated, grouped or transposed ones, kernels that are split themselves, results
that are split along channels as well, and the gradient of a weight where only a part of the mesh is
used. In programs with such layouts (`partition().images`) kernels are unsharded, but for their
input channels, images too for the convolutions that cannot be split, and where only a part of the
mesh is used (`partition().partly`) the gradient of a weight is a product per element of the kernel,
which is partitioned right:

    gradient[o, i, k] = sum over n, s of image[n, i, s * stride + k * dilation] * grad[n, o, s]
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

from .program_partition import partition
from .unsharded_axes import constrained


def kernel_unsharded(kernel: jax.Array, inputs: int | None) -> jax.Array:
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
    """Images that are unsharded but for their batch, where a program splits images.

    The constraint holds for the gradient of `x` too.
    """
    if not partition().images:
        return x
    return _constrain(x, (PartitionSpec.UNCONSTRAINED, *(None,) * (x.ndim - 1)))


def _constrain(x: jax.Array, spec: Sequence[object]) -> jax.Array:
    mesh = partition().mesh
    assert mesh is not None  # images are split
    return constrained(x, NamedSharding(mesh, PartitionSpec(*spec)))
