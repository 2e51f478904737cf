"""Convolutions over axes that are split, into shards of any sizes.

>>> import jax.numpy as jnp
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> mesh = make_mesh((4,), ("x",))
>>> image = shard(jnp.ones((1, 1, 8, 6)), mesh, (None, None, "x"))
>>> kernel = jnp.ones((1, 1, 3, 3))
>>> conv(image, kernel, padding=1).sharding.spec
P(None, None, 'x')
>>> conv(image, kernel, stride=2)                # 3 rows over 4 devices
UnevenArray(float32[1,1,3,2] in float32[1,1,4,2], axis 2 in blocks of 1: 1, 1, 1, 0 valid; P(None, None, 'x'))

Layouts are torch's: `[batch, channels, *space]`, and `[out, in / groups, *space]` for the kernel,
which is replicated. Channels may be split too where the compiler supports it.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from isoshard.core.kit import MODES, any_framework, each_group, halves, window_count

from .reach import METHODS, Operator, View
from .window_arguments import ArgumentErrors
from .window_operators import apply_or_record

Ints = int | Sequence[int]


@dataclasses.dataclass(frozen=True)
class ConvReach:
    """Output o reads `kernel` rows, `dilation` apart, from row `o * stride - before` on."""

    kernel: int
    stride: int
    dilation: int
    before: int
    after: int

    @property
    def native(self) -> bool:
        """With a stride, the gradient that the compiler derives moves more, up to a full block."""
        return self.stride == 1

    def outputs(self, rows: int) -> int:
        """How many kernels fit."""
        pad = self.before, self.after
        return window_count(rows, self.kernel, self.stride, self.dilation, pad)

    def reads(self, o: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """From the first tap up to the last."""
        first = o * self.stride - self.before
        return first, first + (self.kernel - 1) * self.dilation + 1

    def home(self, o: np.ndarray, rows: int) -> np.ndarray:
        """The middle of the kernel."""
        return o * self.stride - self.before + (self.kernel - 1) * self.dilation // 2

    def tables(self, o: np.ndarray, rows: int) -> tuple[np.ndarray, ...]:
        """None are needed."""
        return ()


@dataclasses.dataclass(frozen=True)
class ConvWindow:
    """The convolution of a window.

    Attributes:
        stride: one per axis of space, as `dilation`.
        dilation: between the taps of the kernel.
        groups: of channels.
        sums: dtype of the result, None for that of `x`.
        per_group: whether in a loop over the groups.
    """

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    sums: Any = None
    per_group: bool = False

    def __call__(self, window: Any, views: tuple[View, ...], kernel: Any) -> Any:
        """Compute as many outputs as fit."""
        convolve = functools.partial(
            lax.conv_general_dilated,
            window_strides=self.stride,
            padding=[view.pads for view in views],
            rhs_dilation=self.dilation,
            preferred_element_type=self.sums,
        )
        if self.per_group:
            return each_group(convolve, window, kernel, self.groups)
        return convolve(window, kernel, feature_group_count=self.groups)


@any_framework
def conv(
    x: Any,
    kernel: Any,
    *,
    stride: Ints = 1,
    padding: Ints | str | Sequence[tuple[int, int]] = 0,
    dilation: Ints = 1,
    groups: int = 1,
    mode: str = "zero",
    method: str = "auto",
    mesh: Any = None,
    spec: Any = None,
) -> Any:
    """Convolve over one, two or three axes; the kernel is not flipped (as in all such libraries).

    Args:
        x: `[batch, channels, *space]`, a jax.Array or UnevenArray of floats.
        kernel: `[out, channels / groups, *space]`, of the same dtype.
        stride: rows from one output to the next, one number or one per axis of space.
        padding: padding rows on either side: a number, one per axis, a pair per axis, or "same"
            (as many outputs as rows, for stride 1; the odd one after).
        dilation: rows from one tap to the next.
        groups: into how many separate convolutions the channels fall.
        mode: the values of padding rows, one of `row_windows.MODES`.
        method: "auto" takes the compiler's halos where shards are equal before and after, the
            stride is 1 and padding is zero; "xla" insists on them, "windows" on explicit exchange.
        mesh: with `spec`, the sharding of `x`; needed inside `jax.jit`, on Auto axes.
        spec: any spelling of a spec.

    Returns:
        `[batch, out, *space]`, sharded as `x`: an UnevenArray if `x` is one or the outputs do not
        divide.

    Raises:
        ShardingError: an argument, or the sharding, does not fit.

    Example:
        >>> conv(np.ones((1, 1, 4)), np.ones((1, 2, 3)), groups=3, mode="mirror")
        Traceback (most recent call last):
            ...
        isoshard.core.errors.ShardingError: conv: mode 'mirror' is none of 'zero', 'wrap', 'edge', 'reflect', 'symmetric'; a kernel of shape (1, 2, 3) in 3 groups takes 6 channels, and x has 1; 1 output channels do not fall into 3 groups
    """  # noqa: E501
    errors = ArgumentErrors("conv")
    axes = space_axes(errors, x, kernel)
    strides = errors.per_axis("stride", stride, axes, least=1)
    dilations = errors.per_axis("dilation", dilation, axes, least=1)
    errors.choice("mode", mode, MODES)
    errors.choice("method", method, METHODS)
    spans = [(k - 1) * d + 1 for k, d in zip(kernel.shape[2:], dilations, strict=True)]
    pads = _pads(errors, padding, spans, strides)
    check_channels(errors, x.shape[1], kernel.shape, groups, kernel.shape[1], kernel.shape[0])
    errors.raise_any()
    operator = conv_operator(kernel.shape, strides, pads, dilations, groups)
    operator = dataclasses.replace(operator, mode=mode, method=method)
    return apply_or_record(operator, x, mesh, spec, kernel)


def conv_operator(
    kernel: Sequence[int],
    stride: tuple[int, ...],
    padding: Sequence[tuple[int, int]],
    dilation: tuple[int, ...],
    groups: int,
    sums: Any = None,
) -> Operator:
    """A convolution as an operator.

    Args:
        kernel: the shape of its one operand, `[out, channels / groups, *space]`.
        stride: rows from one output to the next, one number per axis of space.
        padding: rows of zeros before and after.
        dilation: rows from one tap to the next.
        groups: into how many separate convolutions the channels fall.
        sums: dtype of the result; None for that of what is convolved.

    Example:
        >>> conv_operator((1, 1, 3), (1,), ((1, 1),), (1,), 1).reaches[0][1].outputs(8)
        8
    """
    per_axis = zip(kernel[2:], stride, dilation, padding, strict=True)
    reaches = tuple(
        (2 + at, ConvReach(k, s, d, *pad)) for at, (k, s, d, pad) in enumerate(per_axis)
    )
    local = ConvWindow(stride, dilation, groups, sums)
    forms = per_group_forms(local, kernel)
    return Operator(
        "conv", reaches, local, free=(1,), operand_axis=0, per_group=forms, groups=groups
    )


def per_group_forms(window: Any, kernel: Sequence[int]) -> tuple[Any, Any]:
    """Of which form of a convolution CPUs take the gradients of images and of the kernel.

    As a loop over the groups that of the kernel is faster by the number of groups, and that of
    images up to some 4 channels in a group; above, the loop is slower (measured, XLA of JAX 0.10).

    Args:
        window: `groups` of it, and a field `per_group` for the loop.
        kernel: the shape `[out, channels / groups, *space]`.

    Example:
        >>> images, _ = per_group_forms(ConvWindow((1,), (1,), groups=8), (8, 1, 3))
        >>> images.per_group, per_group_forms(ConvWindow((1,), (1,), groups=1), (8, 8, 3))
        (True, (None, None))
    """
    if window.groups == 1:
        return None, None
    loop = dataclasses.replace(window, per_group=True)
    few = kernel[0] // window.groups * kernel[1] <= 16
    return loop if few else None, loop


def space_axes(errors: ArgumentErrors, x: Any, kernel: Any) -> int:
    """How many axes of space there are; ShardingError if the ranks are wrong."""
    axes = len(x.shape) - 2
    errors.require(
        1 <= axes <= 3 and len(kernel.shape) == len(x.shape),
        f"x of shape {tuple(x.shape)} with a kernel of shape {tuple(kernel.shape)}: both have two "
        "axes and then one to three of space",
    )
    errors.raise_any()
    return axes


def check_channels(
    errors: ArgumentErrors, channels: int, kernel: Sequence[int], groups: int, each: int, out: int
) -> None:
    """Note channels that do not fit the kernel's, `each` in a group, or `out` for the results."""
    errors.require(
        each * groups == channels,
        f"a kernel of shape {tuple(kernel)} in {groups} groups takes {each * groups} channels, "
        f"and x has {channels}",
    )
    errors.require(out % groups == 0, f"{out} output channels do not fall into {groups} groups")


def _pads(
    errors: ArgumentErrors, padding: Any, spans: Sequence[int], strides: Sequence[int]
) -> list[tuple[int, int]]:
    if padding == "same":
        errors.require(set(strides) == {1}, f"padding 'same' is for stride 1, and not {strides}")
        return [halves(span - 1) for span in spans]
    pairs = isinstance(padding, Sequence) and all(
        isinstance(pair, tuple | list) and len(pair) == 2 for pair in padding
    )
    if pairs and not isinstance(padding, str):
        before = errors.per_axis("padding", [pair[0] for pair in padding], len(spans), least=0)
        after = errors.per_axis("padding", [pair[1] for pair in padding], len(spans), least=0)
        return list(zip(before, after, strict=True))
    return [(pad, pad) for pad in errors.per_axis("padding", padding, len(spans), least=0)]
