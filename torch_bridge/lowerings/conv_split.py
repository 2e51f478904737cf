"""Convolutions of images that are split over devices along a spatial axis.

XLA's partitioner exchanges halos for a plain convolution of such images. It is wrong, or ends the
process, for others: dilated, grouped or transposed ones, kernels that are split themselves, and the
gradient of a weight where only a part of the mesh is used. The engine says with `splitting` that it
compiles a program with such layouts. Kernels are then kept whole along space, images too for the
convolutions that cannot be split, and the gradient of a weight is a product per element of the
kernel, which is partitioned right:

    gradient[o, i, k] = sum over n, s of image[n, i, s * stride + k * dilation] * grad[n, o, s]

>>> with splitting(Split(None, partly=True)):
...     print(images_are_split_partly())
True
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class Split(NamedTuple):
    """How a program splits images.

    Attributes:
        mesh: over these devices; None where they are not known.
        partly: whether some image is split over a part of them only.
    """

    mesh: Mesh | None
    partly: bool


_SPLIT: contextvars.ContextVar[Split | None] = contextvars.ContextVar("split", default=None)


@contextlib.contextmanager
def splitting(split: Split | None) -> Iterator[None]:
    """Say how the program being compiled splits images; None if it does not."""
    token = _SPLIT.set(split)
    try:
        yield
    finally:
        _SPLIT.reset(token)


def images_are_split_partly() -> bool:
    """Whether the gradients of weights need the product per element of the kernel."""
    split = _SPLIT.get()
    return split is not None and split.partly


def laid_out(x: jax.Array, weight: jax.Array, *, whole: bool) -> tuple[jax.Array, jax.Array]:
    """Images and kernels in layouts that the partitioner treats rightly.

    Args:
        x: images, (batch, channels, *space) or (batch, *space, channels).
        weight: kernels, (out, in, *space).
        whole: keep images whole, but for their batch.
    """
    split = _SPLIT.get()
    if split is None or split.mesh is None:
        return x, weight
    free, space = PartitionSpec.UNCONSTRAINED, (None,) * (x.ndim - 2)
    kernel = (None, None, *space) if whole else (free, free, *space)
    weight = _constrain(weight, split.mesh, kernel)
    return batch_split(x) if whole else x, weight


def batch_split(x: jax.Array) -> jax.Array:
    """Images that are whole, but for their batch, where a program splits images.

    The constraint holds for the gradient of `x` too.
    """
    split = _SPLIT.get()
    if split is None or split.mesh is None:
        return x
    return _constrain(x, split.mesh, (PartitionSpec.UNCONSTRAINED, *(None,) * (x.ndim - 1)))


def _constrain(x, mesh, spec):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return lax.with_sharding_constraint(x, sharding)


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

    def at(place):
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
