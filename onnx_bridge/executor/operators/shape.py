"""Operators that only move elements: reshape, transpose, join, split, cut, repeat.

Their shapes, axes and bounds must be known when the program is compiled.
"""

from __future__ import annotations

import itertools
import math

import jax.numpy as jnp
import numpy as np

from ...errors import ModelError
from .operator_arguments import axes_of, axis_of, choice, library, sizes_of
from .registry import largest, operator


@operator("Shape", known=("x",))
def shape(x, *, start=0, end=None):
    """The sizes of the axes, int64, known while compiling."""
    return np.asarray(x.shape[slice(start, end)], np.int64)


@operator("Size", known=("x",))
def size(x):
    """The number of elements, int64, known while compiling."""
    return np.asarray(math.prod(x.shape), np.int64)


@operator("Reshape", since=5, static=("shape",), host=lambda inputs: inputs[0].size)
def reshape(x, shape, *, allowzero=0):
    """The elements in another shape: 0 keeps an axis (unless `allowzero`), -1 is what is left."""
    sizes = sizes_of(shape)
    if not allowzero:
        if any(n == 0 and axis >= x.ndim for axis, n in enumerate(sizes)):
            raise ModelError(f"shape {list(sizes)} keeps an axis that {x.shape} does not have")
        sizes = tuple(x.shape[axis] if n == 0 else n for axis, n in enumerate(sizes))
    elif 0 in sizes and -1 in sizes:
        raise ModelError(f"shape {list(sizes)} with allowzero=1 has a 0 and a -1: which is open")
    return x.reshape(sizes)


@operator("Flatten")
def flatten(x, *, axis=1):
    """A matrix: the axes before `axis`, and those from it on, as one each."""
    if not -x.ndim <= axis <= x.ndim:
        raise ModelError(f"axis {axis} of a tensor of rank {x.ndim}: {-x.ndim}..{x.ndim} are there")
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@operator("Squeeze", since=13, static=("axes",), host=lambda inputs: inputs[0].size)
def squeeze(x, axes=None):
    """The input without axes of size 1: all, or the given."""
    return _squeeze(x, axes)


@operator("Squeeze", host=largest)
def squeeze_by_attribute(x, *, axes=None):
    """`Squeeze` before opset 13."""
    return _squeeze(x, axes)


def _squeeze(x, axes):
    if axes is None:
        return x.reshape([n for n in x.shape if n != 1])
    gone = axes_of(axes, x.ndim)
    wrong = [axis for axis in gone if x.shape[axis] != 1]
    if wrong:
        raise ModelError(f"axes {wrong} of shape {x.shape} are not of size 1")
    return x.reshape([n for axis, n in enumerate(x.shape) if axis not in gone])


@operator("Unsqueeze", since=13, static=("axes",), host=lambda inputs: inputs[0].size)
def unsqueeze(x, axes):
    """The input with axes of size 1 where the result has `axes`."""
    return _unsqueeze(x, axes)


@operator("Unsqueeze", host=largest)
def unsqueeze_by_attribute(x, *, axes):
    """`Unsqueeze` before opset 13."""
    return _unsqueeze(x, axes)


def _unsqueeze(x, axes):
    rank = x.ndim + len(np.asarray(axes).reshape(-1))
    new, old = axes_of(axes, rank), iter(x.shape)
    return x.reshape([1 if axis in new else next(old) for axis in range(rank)])


@operator("Transpose", host=largest)
def transpose(x, *, perm=None):
    """The axes in another order; reversed by default."""
    return x.transpose(perm)


def _expanded(inputs):
    return math.prod(np.broadcast_shapes(inputs[0].shape, sizes_of(inputs[1])))


@operator("Expand", since=8, static=("shape",), host=_expanded)
def expand(x, shape):
    """The input broadcast to a shape, and that to the input's."""
    return library(x).broadcast_to(x, np.broadcast_shapes(x.shape, sizes_of(shape)))


@operator("Tile", since=6, static=("repeats",))
def tile(x, repeats):
    """The input repeated along each axis."""
    return jnp.tile(x, sizes_of(repeats))


@operator("Concat", since=4, host=largest)
def concat(*inputs, axis):
    """The inputs joined along an axis."""
    return library(*inputs).concatenate(inputs, axis=axis_of(axis, inputs[0].ndim))


@operator("Split", since=18, static=("split",), host=largest, counted=True)
def split(x, split=None, *, axis=0, num_outputs=None, outputs):
    """Slices along an axis: of the sizes passed, or of equal size with a smaller last one."""
    axis = axis_of(axis, x.ndim)
    if split is not None:
        return _split_at(x, sizes_of(split), axis, outputs)
    if num_outputs not in (None, outputs):
        raise ModelError(f"num_outputs is {num_outputs}, and the node has {outputs} outputs")
    count = outputs
    size = -(-x.shape[axis] // count)
    sizes = [max(min(size, x.shape[axis] - size * k), 0) for k in range(count)]
    return _split_at(x, sizes, axis, outputs)


@operator("Split", since=13, static=("split",), host=largest, counted=True)
def split_evenly(x, split=None, *, axis=0, outputs):
    """`Split` of opsets 13 to 17."""
    return _split_evenly(x, None if split is None else sizes_of(split), axis, outputs)


@operator("Split", since=2, host=largest, counted=True)
def split_by_attribute(x, *, axis=0, split=None, outputs):
    """`Split` before opset 13."""
    return _split_evenly(x, split, axis, outputs)


def _split_evenly(x, sizes, axis, outputs):
    axis = axis_of(axis, x.ndim)
    if sizes is None:
        if x.shape[axis] % outputs:
            raise ModelError(
                f"axis {axis} of size {x.shape[axis]} cannot be split into {outputs} equal shards: "
                "give their sizes"
            )
        sizes = [x.shape[axis] // outputs] * outputs
    return _split_at(x, sizes, axis, outputs)


def _split_at(x, sizes, axis, outputs):
    if sum(sizes) != x.shape[axis] or len(sizes) != outputs or min(sizes, default=0) < 0:
        raise ModelError(
            f"sizes {list(sizes)} do not split axis {axis} of size {x.shape[axis]} into "
            f"{outputs} shards"
        )
    ends = np.cumsum([0, *sizes]).tolist()
    lead = (slice(None),) * axis
    return tuple(x[(*lead, slice(a, b))] for a, b in itertools.pairwise(ends))


@operator("Slice", since=10, static=("starts", "ends", "axes", "steps"), host=largest)
def slice_(x, starts, ends, axes=None, steps=None):
    """A range of each named axis; negative bounds count from the end, larger ones are cut."""
    return _slice(x, *(None if v is None else sizes_of(v) for v in (starts, ends, axes, steps)))


@operator("Slice", host=largest)
def slice_by_attributes(x, *, starts, ends, axes=None):
    """`Slice` before opset 10."""
    return _slice(x, starts, ends, axes, None)


def _slice(x, starts, ends, axes, steps):
    axes = axes_of(range(len(starts)) if axes is None else axes, x.ndim)
    steps = (1,) * len(axes) if steps is None else steps
    if 0 in steps:
        raise ModelError(f"steps {list(steps)} hold a 0")
    index = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        first, last, step = slice(start, end, step).indices(x.shape[axis])
        index[axis] = slice(first, None if last < 0 else last, step)
    return x[tuple(index)]


@operator("DepthToSpace")
def depth_to_space(x, *, blocksize, mode="DCR"):
    """Channels moved into blocks of pixels."""
    n, c, h, w = x.shape
    b = blocksize
    if choice(mode, "mode", ("DCR", "CRD")) == "DCR":
        y = x.reshape(n, b, b, c // b**2, h, w).transpose(0, 3, 4, 1, 5, 2)
    else:
        y = x.reshape(n, c // b**2, b, b, h, w).transpose(0, 1, 4, 2, 5, 3)
    return y.reshape(n, c // b**2, h * b, w * b)


@operator("SpaceToDepth")
def space_to_depth(x, *, blocksize):
    """Blocks of pixels moved into channels."""
    n, c, h, w = x.shape
    b = blocksize
    y = x.reshape(n, c, h // b, b, w // b, b).transpose(0, 3, 5, 1, 2, 4)
    return y.reshape(n, c * b * b, h // b, w // b)
