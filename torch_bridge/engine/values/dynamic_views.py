"""Views at places that a program takes as numbers.

`x[3]` and `x[4]` are two chains, and programs with them two programs. With its place apart, a view
operation is the same for both: `("index", 0, 3)` is `("index_at", 0)` and 3, and
`("slice", 0, 6, 12, 2)` is `("slice_at", 0, 3, 2)` and 6: three elements, every other one.

>>> operation, start = split_start(("index", 0, 1))
>>> operation, start
(('index_at', 0), 1)
>>> x = jax.numpy.arange(6.0).reshape(2, 3)
>>> base = Aval.contiguous((2, 3), torch.float32)
>>> read((operation,), base, x, [jax.numpy.array(start)]).tolist()
[3.0, 4.0, 5.0]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch  # noqa: F401  (for the doctest)
from jax import lax

from isoshard.torch_bridge.lowerings.argument_forms import index_dtype
from isoshard.torch_bridge.lowerings.index_updates import write_slice
from isoshard.torch_bridge.lowerings.unsharded_axes import unsharded

from .value import Aval
from .views import ViewOp, backward, forward

_AT = frozenset({"index_at", "slice_at"})
_SCATTERED = frozenset({"unfold", "strided", "taken", "expand"})


def split_start(op: ViewOp) -> tuple[ViewOp, int] | None:
    """A view operation without its place, and that; None of one that has none, or shows nothing."""
    if op[0] == "index":
        return ("index_at", op[1]), op[2]
    if op[0] == "slice":
        _, dim, start, stop, step = op
        count = -(-(stop - start) // step)
        if count > 0:
            return ("slice_at", dim, count, step), start
    return None


def split_starts(ops: Sequence[ViewOp]) -> tuple[tuple[ViewOp, ...], tuple[int, ...]]:
    """The operations of a view without their places, and these.

    >>> split_starts((("permute", (1, 0)), ("index", 0, 3)))
    ((('permute', (1, 0)), ('index_at', 0)), (3,))
    """
    pairs = [split_start(op) or (op, None) for op in ops]
    return tuple([op for op, _ in pairs]), tuple([at for _, at in pairs if at is not None])


def is_single(op: ViewOp) -> bool:
    """Whether an operation without its start shows one index along the axis."""
    return op[0] == "index_at" or op[2] == 1


def can_write(ops: Sequence[ViewOp]) -> bool:
    """Whether `write` can write through a chain: one element is not seen at several places."""
    return all(op[0] not in _SCATTERED for op in ops[:-1])


def read(ops: Sequence[ViewOp], base: Aval, x: jax.Array, starts: Sequence[Any]) -> jax.Array:
    """What a view shows."""
    left = iter(starts)
    for op in ops:
        x = _forward(op, x, base, left)
    return x


def write(
    ops: Sequence[ViewOp], base: Aval, x: jax.Array, values: jax.Array, starts: Sequence[Any]
) -> jax.Array:
    """The storage's value after `values` is written to a view; arguments as of `read`."""
    left = iter(starts)
    stages = [x]
    for op in ops[:-1]:
        stages.append(_forward(op, stages[-1], base, left))
    right = iter(reversed(starts))
    for op, stage in zip(reversed(ops), reversed(stages), strict=True):
        if op[0] in _AT:
            values = put_at(op, stage, values, next(right))
        else:
            values = backward(op, stage, values, base)
    return values


def put_at(op: ViewOp, x: jax.Array, values: jax.Array, start: Any) -> jax.Array:
    """`x` with what an operation shows of it at a place replaced by `values`.

    On a mesh only of one that `is_single`, and of a slice only without steps.
    """
    dim = op[1]
    if op[0] == "index_at":
        values = jnp.expand_dims(values, dim)
    start = _start_index(start, x.shape[dim])
    return write_slice(x, values, dim, start, start + values.shape[dim])


def _forward(op: ViewOp, x: jax.Array, base: Aval, starts: Any) -> jax.Array:
    if op[0] not in _AT:
        return forward(op, x, base)
    dim = op[1]
    count, step = (1, 1) if op[0] == "index_at" else op[2:]
    extent = (count - 1) * step + 1
    start = _start_index(next(starts), x.shape[dim])
    x = lax.dynamic_slice_in_dim(unsharded(x, [dim]), start, extent, dim)
    if op[0] == "index_at":
        return jnp.squeeze(x, dim)
    return x if step == 1 else lax.slice_in_dim(x, 0, extent, step, dim)


def _start_index(start: Any, size: int) -> jax.Array:
    """A place along an axis, which came as a float, as an integer."""
    return start.astype(index_dtype(size))
