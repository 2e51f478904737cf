"""Convolutions: kernels and paddings of transposed ones, groups, and the gradient of a kernel.

Layouts are torch's: `(batch, channels, *space)` for images, and `(out, in / groups, *space)` for
the kernel, `(in, out / groups, *space)` for that of a transposed convolution. This is the plain
convolution of its input, spread out by the stride, with the kernel flipped and its channel axes
exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from .precision import wide_dtype
from .window_grid import window_elements


def halves(total: int, *, more_before: bool = False) -> tuple[int, int]:
    """Split a padding into before and after; the extra one of an odd number is after, or before."""
    less = total // 2
    return (total - less, less) if more_before else (less, total - less)


def on_channel_axis(values: jax.Array, rank: int) -> jax.Array:
    """Reshape one value per channel to broadcast over `rank` spatial axes."""
    return values.reshape(-1, *(1,) * rank)


def transposed_kernel(kernel: jax.Array, groups: int) -> jax.Array:
    """The kernel of the plain convolution: `(out, in / groups, *space)`, and flipped.

    >>> transposed_kernel(jnp.arange(6).reshape(2, 1, 3), 1).tolist()
    [[[2, 1, 0], [5, 4, 3]]]
    """
    channels, out, *space = kernel.shape
    split = kernel.reshape(groups, channels // groups, out, *space).swapaxes(1, 2)
    joined = split.reshape(groups * out, channels // groups, *space)
    return lax.rev(joined, tuple(range(2, kernel.ndim)))


def transposed_padding(
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[tuple[int, int]],
    extra: Sequence[int],
) -> list[tuple[int, int]]:
    """The padding of the plain convolution.

    Args:
        kernel: sizes of the kernel; one per spatial axis, as are the others.
        dilation: between the elements of the kernel.
        padding: removed from the result, before and after.
        extra: added to the result at the end.

    >>> transposed_padding((3,), (1,), [(1, 1)], (1,))
    [(1, 2)]
    """
    return [
        (d * (k - 1) - before, d * (k - 1) - after + more)
        for k, d, (before, after), more in zip(kernel, dilation, padding, extra, strict=True)
    ]


def each_group(
    convolve: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,
    kernel: jax.Array,
    groups: int,
    channels: int = 1,
) -> jax.Array:
    """A convolution in groups as a loop over them.

    XLA's CPU compiler computes the gradient of a grouped convolution's kernel as that of an
    ungrouped one, `groups` times the work. With more padding than would keep the size, as in the
    gradient of unpadded images, it materializes all windows: elements of the kernel times the
    memory of the images (JAX 0.10.2). The gradients of this loop are loops, too.

    Args:
        convolve: the convolution of the images and the kernel of one group.
        x: images of all groups.
        kernel: the groups' kernels along its first axis.
        groups: the number of groups.
        channels: the axis of the channels, in `x` and in the result.

    >>> x, kernel = jnp.arange(8.0).reshape(1, 2, 4), jnp.ones((2, 1, 3))
    >>> print(each_group(lambda x, k: lax.conv_general_dilated(x, k, (1,), "VALID"), x, kernel, 2))
    [[[ 3.  6.]
      [15. 18.]]]
    """
    before, after = x.shape[:channels], x.shape[channels + 1 :]
    images = x.reshape(*before, groups, x.shape[channels] // groups, *after)
    kernels = kernel.reshape(groups, kernel.shape[0] // groups, *kernel.shape[1:])
    results = lax.map(lambda pair: convolve(*pair), (jnp.moveaxis(images, channels, 0), kernels))
    out = jnp.moveaxis(results, 0, channels)
    before, (_, each, *after) = out.shape[:channels], out.shape[channels:]
    return out.reshape(*before, groups * each, *after)


def kernel_gradient(
    image: jax.Array,
    grad: jax.Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> jax.Array:
    """The gradient of the kernel of a plain convolution, one product for each of its elements.

        gradient[o, i, k] = sum over n, s of image[n, i, s * stride + k * dilation] * grad[n, o, s]

    Args:
        image: the input of the convolution, (batch, in, *space).
        grad: gradient of the result, (batch, out, *space).
        kernel: sizes of the kernel.
        stride: one per spatial axis, as are the next two.
        padding: on both sides.
        dilation: between the elements of the kernel.
        groups: of channels.

    Returns:
        Gradient of the kernel, (out, in / groups, *kernel).
    """
    count, out, *size = grad.shape
    image = jnp.pad(image, [(0, 0), (0, 0), *((p, p) for p in padding)])
    image = image.reshape(count, groups, -1, *image.shape[2:])
    grad = grad.reshape(count, groups, out // groups, *size)
    space = "xyz"[: len(size)]
    equation, sums = f"ngi{space},ngo{space}->goi", wide_dtype(image.dtype)
    products = [
        jnp.einsum(equation, window, grad, preferred_element_type=sums)
        for window in window_elements(image, kernel, stride, dilation, size)
    ]
    gradient = jnp.stack(products, axis=-1)
    return gradient.reshape(out, image.shape[2], *kernel).astype(grad.dtype)
