"""Transposed convolutions over axes that are split, into shards of any sizes.

>>> import jax.numpy as jnp
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> rows = shard(jnp.ones((1, 1, 8)), make_mesh((4,), ("x",)), (None, None, "x"))
>>> conv_transpose(rows, jnp.ones((1, 1, 4)), stride=2, padding=1).sum().item()
30.0

Layouts are torch's: `[batch, channels, *space]`, and `[channels, out / groups, *space]` for the
kernel. Each device reads the rows that reach its outputs, computes all that they reach, and keeps
its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from isoshard.core.kit import any_framework, each_group, settled, transposed_kernel

from .conv import Ints, check_channels, per_group_forms, space_axes
from .reach import METHODS, Operator, View
from .window_arguments import ArgumentErrors
from .window_operators import apply_or_record


@dataclasses.dataclass(frozen=True)
class TransposedReach:
    """Row i gives to outputs `i * stride - padding + t * dilation`, for each tap t."""

    kernel: int
    stride: int
    dilation: int
    padding: int
    extra: int
    native = False  # of the gradient the compiler gathers unsplit axes

    def outputs(self, rows: int) -> int:
        """As many as the rows reach, less the padding."""
        span = (self.kernel - 1) * self.dilation + 1
        return (rows - 1) * self.stride + span - 2 * self.padding + self.extra

    def reads(self, o: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows that reach an output; rows outside the axis are not read."""
        last = (o + self.padding) // self.stride
        first = -(((self.kernel - 1) * self.dilation - o - self.padding) // self.stride)
        first = np.minimum(first, last)  # a stride longer than the kernel: no row at all
        return np.clip(first, 0, rows - 1), np.clip(last + 1, 1, rows)

    def home(self, o: np.ndarray, rows: int) -> np.ndarray:
        """The row whose middle tap comes nearest."""
        return (o + self.padding - (self.kernel - 1) * self.dilation // 2) // self.stride

    def tables(self, o: np.ndarray, rows: int) -> tuple[np.ndarray, ...]:
        """The outputs' indices."""
        return (o.astype(np.int32),)


@dataclasses.dataclass(frozen=True)
class TransposedWindow:
    """The transposed convolution of a window: all that its rows reach, then the outputs required.

    Where it is taken `per_group`, in a loop over the groups.
    """

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    extra: tuple[int, ...]
    groups: int
    sums: Any = None
    per_group: bool = False

    def __call__(self, window: Any, views: tuple[View, ...], kernel: Any) -> Any:
        """Compute the outputs; the kernel is that of the ordinary convolution."""
        space = kernel.shape[2:]
        spans = [(k - 1) * d + 1 for k, d in zip(space, self.dilation, strict=True)]
        pads, begins = [], []
        for axis, (view, span) in enumerate(zip(views, spans, strict=True)):
            begin = view.tables[0][0] + self.padding[axis] - view.start * self.stride[axis]
            reached = (window.shape[axis + 2] - 1) * self.stride[axis] + span
            if isinstance(begin, np.integer):
                pads.append((span - 1 - int(begin), span - 1 + int(begin) + view.outputs - reached))
                begins.append(None)
            else:
                latest = max(span, self.stride[axis]) + self.extra[axis]
                pads.append((span - 1, span - 1 + max(0, latest + view.outputs - reached)))
                begins.append(settled(jnp.reshape(begin, (1, 1)))[0, 0])
        convolve = functools.partial(
            lax.conv_general_dilated,
            window_strides=(1,) * len(views),
            padding=pads,
            lhs_dilation=self.stride,
            rhs_dilation=self.dilation,
            preferred_element_type=self.sums,
        )
        if self.per_group:
            out = each_group(convolve, window, kernel, self.groups)
        else:
            out = convolve(window, kernel, feature_group_count=self.groups)
        for axis, (view, begin) in enumerate(zip(views, begins, strict=True)):
            if begin is not None:
                out = lax.dynamic_slice_in_dim(out, begin, view.outputs, axis + 2)
        return out


@any_framework
def conv_transpose(
    x: Any,
    kernel: Any,
    *,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    dilation: Ints = 1,
    groups: int = 1,
    method: str = "auto",
    mesh: Any = None,
    spec: Any = None,
) -> Any:
    """Convolve transposed over one, two or three axes, as torch's `conv_transpose1d` to `3d`.

    Args:
        x: `[batch, channels, *space]`, a jax.Array or UnevenArray of floats.
        kernel: `[channels, out / groups, *space]`, of the same dtype.
        stride: outputs from one row's to the next one's; one number or one per axis of space.
        padding: outputs dropped on either side.
        output_padding: outputs more at the end; less than the stride or the dilation.
        dilation: outputs from one tap to the next.
        groups: into how many separate convolutions the channels fall.
        method: "xla" insists on the compiler's halos, whose gradient gathers the axis; "auto" and
            "windows" exchange explicitly.
        mesh: with `spec`, the sharding of `x`; needed inside `jax.jit`, on Auto axes.
        spec: any spelling of a spec.

    Returns:
        `[batch, out, *space]`, sharded as `x`.

    Raises:
        ShardingError: an argument, or the sharding, does not fit.

    Example:
        >>> conv_transpose(np.ones((1, 1, 4)), np.ones((1, 1, 3)), output_padding=2)
        Traceback (most recent call last):
            ...
        isoshard.core.errors.ShardingError: conv_transpose: output_padding (2,) is not less than stride (1,) or dilation (1,)
    """  # noqa: E501
    errors = ArgumentErrors("conv_transpose")
    axes = space_axes(errors, x, kernel)
    strides = errors.per_axis("stride", stride, axes, least=1)
    dilations = errors.per_axis("dilation", dilation, axes, least=1)
    pads = errors.per_axis("padding", padding, axes, least=0)
    extra = errors.per_axis("output_padding", output_padding, axes, least=0)
    errors.require(
        all(e < max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True)),
        f"output_padding {extra} is not less than stride {strides} or dilation {dilations}",
    )
    errors.choice("method", method, METHODS)
    shape = kernel.shape
    each, out = shape[0] // max(groups, 1), shape[1] * groups
    check_channels(errors, x.shape[1], shape, groups, each, out)
    errors.raise_any()
    operator = transposed_operator(shape, strides, pads, extra, dilations, groups)
    operator = dataclasses.replace(operator, method=method)
    return apply_or_record(operator, x, mesh, spec, transposed_kernel(kernel, groups))


def transposed_operator(
    kernel: Sequence[int],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    extra: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    sums: Any = None,
) -> Operator:
    """A transposed convolution as an operator, of the `transposed_kernel`.

    Example:
        >>> transposed_operator((1, 1, 4), (2,), (1,), (0,), (1,), 1).reaches[0][1].outputs(8)
        16
    """
    per_axis = zip(kernel[2:], stride, dilation, padding, extra, strict=True)
    reaches = tuple((axis + 2, TransposedReach(*each)) for axis, each in enumerate(per_axis))
    local = TransposedWindow(stride, dilation, padding, extra, groups, sums)
    forms = per_group_forms(local, kernel)
    return Operator("conv_transpose", reaches, local, free=(1,), per_group=forms, groups=groups)
