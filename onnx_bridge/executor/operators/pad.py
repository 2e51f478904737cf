"""Pad: elements added around a tensor, or cut off by negative numbers."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from ...errors import ModelError
from .operator_arguments import axes_of, choice, sizes_of
from .registry import operator

_MOST_REPEATS = 1024
_MODES = {"constant": "constant", "reflect": "reflect", "edge": "edge", "wrap": "wrap"}


@operator("Pad", since=11, static=("pads", "axes"))
def pad(data, pads, constant_value=None, axes=None, *, mode="constant"):
    """The tensor with elements before and after its axes.

    Args:
        data: any tensor.
        pads: how many before each of `axes`, then after each; negative ones cut.
        constant_value: what is added in mode "constant"; zero if left out.
        axes: which; all if left out.
        mode: "constant", "reflect" (without the edge), "edge", "wrap".

    Returns:
        The padded tensor.
    """
    return _pad(data, sizes_of(pads), constant_value, axes, mode)


@operator("Pad", since=2)
def pad_by_attributes(data, *, pads, value=0.0, mode="constant"):
    """`Pad` before opset 11."""
    return _pad(data, pads, jnp.asarray(value, data.dtype), None, mode)


def _pad(data, pads, value, axes, mode):
    choice(mode, "mode", tuple(_MODES))
    named = tuple(range(data.ndim)) if axes is None else axes_of(axes, data.ndim)
    if len(pads) != 2 * len(named):
        raise ModelError(f"pads {list(pads)} are not two numbers for each of {len(named)} axes")
    amounts = [(0, 0)] * data.ndim
    for k, axis in enumerate(named):
        amounts[axis] = (pads[k], pads[k + len(named)])
    if mode == "constant":
        fill = jnp.zeros((), data.dtype) if value is None else value.reshape(()).astype(data.dtype)
        return lax.pad(data, fill, [(before, after, 0) for before, after in amounts])
    crop = tuple(
        slice(max(-before, 0), size - max(-after, 0))
        for size, (before, after) in zip(data.shape, amounts, strict=True)
    )
    added = [(max(before, 0), max(after, 0)) for before, after in amounts]
    if any(
        max(some) > _MOST_REPEATS * size for some, size in zip(added, data[crop].shape, strict=True)
    ):
        raise ModelError(
            f"pads {list(pads)} repeat a tensor of shape {data.shape} more than {_MOST_REPEATS} "
            "times"
        )
    return jnp.pad(data[crop], added, mode=_MODES[mode])
