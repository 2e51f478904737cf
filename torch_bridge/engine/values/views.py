"""Views as chains of small functional operations.

A torch view shares memory with its base. Here memory is a `Storage` whose value JAX stores, so a
view is the chain of operations that leads from the storage to it. Reading applies the chain;
writing applies it backwards: the new part is put into a copy of the whole, which becomes the
storage's new value (under `jit` XLA does this in place).

>>> import torch
>>> from isoshard.torch_bridge.engine.values.value import Aval
>>> base = Chain.root(Aval.contiguous((2, 3), torch.float32))
>>> row = base.then(("index", 0, 1))                # x[1]
>>> x = jax.numpy.arange(6.0).reshape(2, 3)
>>> row.read(x).tolist()
[3.0, 4.0, 5.0]
>>> row.write(x, jax.numpy.zeros(3)).tolist()
[[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]]
"""

from __future__ import annotations

import math
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.torch_bridge.lowerings.index_updates import put, read_slice, write_slice
from isoshard.torch_bridge.lowerings.unsharded_axes import diagonal

from . import bit_views
from .value import Aval, contiguous_stride

ViewOp = tuple[Any, ...]


class Chain:
    """The way from a storage to one of its views.

    A chain lives as long as it has a reference, and until then it is the only one with its base and
    operations. It references the chain that it extends, which leads to it.

    Attributes:
        base: the storage, as one tensor.
        ops: the view operations, first applied first; empty for the whole storage.
        size: the shape of the view.
        recipes: read and write recipes, filled in by the tape when first needed.
    """

    __slots__ = ("__weakref__", "_next", "_parent", "base", "ops", "recipes", "size")

    def __init__(
        self,
        base: Aval,
        ops: tuple[ViewOp, ...],
        size: tuple[int, ...],
        parent: Chain | None = None,
    ):
        """Use `Chain.root` and `then`, which intern."""
        self._parent = parent
        self.base = base
        self.ops = ops
        self.size = size
        self.recipes: dict[str, Any] = {}
        self._next: weakref.WeakValueDictionary[ViewOp, Chain] | None = None

    @staticmethod
    def root(base: Aval) -> Chain:
        """The chain of the storage itself."""
        if base.root is None:
            with _INTERNING:
                if base.root is None:
                    base.root = Chain(base, (), base.meta.size)
        return base.root

    def then(self, op: ViewOp) -> Chain:
        """This view followed by one more operation."""
        following = self._next
        chain = None if following is None else following.get(op)
        if chain is None:
            with _INTERNING:
                if self._next is None:
                    self._next = weakref.WeakValueDictionary()
                chain = self._next.get(op)
                if chain is None:
                    chain = self._next[op] = self._then(op)
        return chain

    def _then(self, op: ViewOp) -> Chain:
        if op[0] == "strided":
            return self._strided(*op[1:])
        size = _shape_after(op, self.size, self.base)
        if _is_identity(op, self.size):
            return self
        if self.ops and self.ops[-1][0] == "expand" and op[0] in ("index", "slice", "permute"):
            return self._before_expand(op)
        if self.ops and op[0] == self.ops[-1][0] in ("permute", "reshape"):
            shorter = self._shorter()
            last = self.ops[-1]
            merged = ("permute", tuple(last[1][d] for d in op[1])) if op[0] == "permute" else op
            return shorter.then(merged)
        return Chain(self.base, (*self.ops, op), size, self)

    def _shorter(self) -> Chain:
        """This view without its last operation."""
        assert self._parent is not None
        return self._parent

    def _before_expand(self, op: ViewOp) -> Chain:
        """Select from a broadcast by selecting first: then a write has one copy as its target."""
        small = self._shorter()
        small = small.then(("reshape", (1,) * (len(self.size) - len(small.size)) + small.size))
        size = _shape_after(op, self.size, self.base)
        if op[0] == "permute":
            return small.then(op).then(("expand", size))
        axis = op[1]
        if op[0] == "index":
            chosen = 0 if small.size[axis] == 1 else op[2]
            return small.then(("index", axis, chosen)).then(("expand", size))
        if small.size[axis] == 1 and self.size[axis] > 1:
            small = small if size[axis] else small.then(("slice", axis, 0, 0, 1))
            return small.then(("expand", size))
        return small.then(op).then(("expand", size))

    def _strided(self, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Chain:
        """`as_strided` addresses the storage, whatever view it is called on."""
        chain = Chain.root(self.base)
        simple = _as_slices(self.base, size, stride, offset)
        if simple is None:
            op = ("strided", size, stride, offset)
            return chain.then(op) if self.ops else Chain(self.base, (op,), size, self)
        for op in simple:
            chain = chain.then(op)
        return chain

    def flat(self, dtype: np.dtype) -> Chain:
        """The storage's memory, seen as a row of elements of another dtype.

        Args:
            dtype: in JAX's buffers; complex memory is seen as real and imaginary parts first.
        """
        chain = Chain.root(self.base).then(("permute", tuple(_order(self.base))))
        count, base_dtype = math.prod(self.size), np.dtype(self.base.physical)
        if base_dtype.kind == "c":
            chain, count = chain.then(("as_real",)), 2 * count
            base_dtype = np.dtype(f"float{4 * base_dtype.itemsize}")
        chain = chain.then(("reshape", (count,)))
        if base_dtype == dtype:
            return chain
        return chain.then(
            ("bitcast", (count * base_dtype.itemsize // np.dtype(dtype).itemsize,), dtype)
        )

    def read(self, memory: jax.Array) -> jax.Array:
        """The view's value, from the storage's."""
        for op in self.ops:
            memory = forward(op, memory, self.base)
        return memory

    def write(self, memory: jax.Array, values: jax.Array) -> jax.Array:
        """The storage's value after `values` is written to the view."""
        if any(op[0] in ("unfold", "strided", "taken", "expand") for op in self.ops[:-1]):
            return _write_elements(self.ops, self.base, memory, values)
        stages = [memory]
        for op in self.ops[:-1]:
            stages.append(forward(op, stages[-1], self.base))
        for op, stage in zip(reversed(self.ops), reversed(stages), strict=True):
            values = backward(op, stage, values, self.base)
        return values

    def __repr__(self) -> str:
        """Readable in error messages."""
        return f"Chain({self.base.meta.size}, {self.ops})"


_INTERNING = threading.RLock()


def _is_identity(op: ViewOp, size: tuple[int, ...]) -> bool:
    if op[0] in ("reshape", "expand"):
        return op[1] == size
    if op[0] == "permute":
        return op[1] == tuple(range(len(size)))
    return op[0] == "slice" and op[2:] == (0, size[op[1]], 1)


def _shape_after(op: ViewOp, size: tuple[int, ...], base: Aval) -> tuple[int, ...]:
    kind = op[0]
    if kind in ("reshape", "expand", "taken"):
        return op[1]
    if kind == "permute":
        return tuple(size[d] for d in op[1])
    if kind == "bitcast":
        return op[1]
    if kind == "slice":
        _, dim, start, stop, step = op
        return (*size[:dim], max(0, -(-(stop - start) // step)), *size[dim + 1 :])
    if kind == "index":
        return (*size[: op[1]], *size[op[1] + 1 :])
    struct = jax.eval_shape(lambda x: forward(op, x, base), jax.ShapeDtypeStruct(size, "float32"))
    return struct.shape


def forward(op: ViewOp, x: jax.Array, base: Aval) -> jax.Array:
    """Apply one view operation; `base` is the storage it belongs to."""
    kind = op[0]
    if kind == "reshape":
        return x.reshape(op[1])
    if kind == "permute":
        return x.transpose(op[1])
    if kind == "expand":
        return jnp.broadcast_to(x, op[1])
    if kind == "slice":
        _, dim, start, stop, step = op
        if stop - start <= step:  # one element: XLA's partitioner fails for slices with steps
            stop, step = min(stop, start + 1), 1
        return read_slice(x, dim, start, max(start, stop), step)
    if kind == "index":
        return jnp.squeeze(read_slice(x, op[1], op[2], op[2] + 1), op[1])
    if kind == "diagonal":
        return diagonal(x, *op[1:])
    if kind == "unfold":
        _, dim, size, step = op
        index = _windows(x.shape[dim], size, step)
        taken = jnp.take(x, index.ravel(), axis=dim)
        taken = taken.reshape(*x.shape[:dim], *index.shape, *x.shape[dim + 1 :])
        return jnp.moveaxis(taken, dim + 1, -1)
    if kind == "strided":
        return _flat(x, base)[_positions(*op[1:])]
    if kind == "taken":
        return x[_positions(*op[1:])]
    if kind == "bitcast":
        return bit_views.bitcast(x, op[1], op[2])
    if kind == "conj":
        return jnp.conj(x)
    if kind == "neg":
        return jnp.negative(x)
    if kind == "as_real":
        return jnp.stack([x.real, x.imag], axis=-1)
    if kind == "as_complex":
        return jax.lax.complex(x[..., 0], x[..., 1])
    raise ValueError(f"unknown view operation {op}")


def backward(op: ViewOp, memory: jax.Array, values: jax.Array, base: Aval) -> jax.Array:
    """`memory` with what one view operation shows of it replaced by `values`."""
    kind = op[0]
    if kind == "reshape":
        return values.reshape(memory.shape)
    if kind == "permute":
        return values.transpose(np.argsort(op[1]))
    if kind == "slice":
        _, dim, start, stop, step = op
        if values.shape[dim] == 1:
            stop, step = start + 1, 1
        return write_slice(memory, values, dim, start, stop, step)
    if kind == "index":
        dim, start = op[1:]
        return write_slice(memory, jnp.expand_dims(values, dim), dim, start, start + 1)
    if kind == "bitcast":
        return bit_views.bitcast(values, memory.shape, memory.dtype)
    if kind in ("conj", "neg"):
        return forward(op, values, base)
    if kind == "as_real":
        return jax.lax.complex(values[..., 0], values[..., 1])
    if kind == "as_complex":
        return jnp.stack([values.real, values.imag], axis=-1)
    if kind == "strided":
        return _unflat(put(_flat(memory, base), _positions(*op[1:]), values), base)
    if kind == "taken":
        return bit_views.put(memory, _positions(*op[1:]), values)
    # Diagonals and windows: a view of the positions tells where each element goes.
    with jax.ensure_compile_time_eval():
        positions = jnp.arange(math.prod(memory.shape)).reshape(memory.shape)
        indices = np.asarray(forward(op, positions, base))
    return put(memory.reshape(-1), indices.ravel(), values.reshape(-1)).reshape(memory.shape)


def _write_elements(
    ops: tuple[ViewOp, ...], base: Aval, memory: jax.Array, values: jax.Array
) -> jax.Array:
    """Write to a part of a view whose elements overlap: each goes to its own place.

    Places are counted in units as wide as the narrowest element that a view of the chain has, and a
    wider element has several of them, along a last axis.
    """
    widths = [memory.dtype.itemsize, values.dtype.itemsize]
    widths += [np.dtype(op[2]).itemsize for op in ops if op[0] == "bitcast"]
    unit = min(widths)
    with jax.ensure_compile_time_eval():
        count = memory.dtype.itemsize // unit
        indices = jnp.arange(memory.size * count).reshape(*memory.shape, count)
        for op in ops:
            if op[0] in ("conj", "neg"):
                values = forward(op, values, base)
            elif op[0] == "bitcast":
                indices = indices.reshape(*op[1], np.dtype(op[2]).itemsize // unit)
            elif op[0] == "as_real":
                indices = indices.reshape(*indices.shape[:-1], 2, -1)
            elif op[0] == "as_complex":
                indices = indices.reshape(*indices.shape[:-2], -1)
            else:
                indices = jax.vmap(lambda x, op=op: forward(op, x, base), -1, -1)(indices)
        indices = np.asarray(indices)
    if not indices.size:
        return memory
    if all(op[0] not in ("bitcast", "as_real", "as_complex") for op in ops):
        return put(memory.reshape(-1), indices.ravel(), values.reshape(-1)).reshape(memory.shape)
    flat = put(bit_views.as_units(memory, unit), indices.ravel(), bit_views.as_units(values, unit))
    return bit_views.of_units(flat, memory.shape, memory.dtype)


def _windows(extent: int, size: int, step: int) -> np.ndarray:
    starts = np.arange(0, extent - size + 1, step)
    return starts[:, None] + np.arange(size)


def _positions(size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> np.ndarray:
    """The index of each element in the storage's memory."""
    where = np.full(size, offset, np.int32)
    for axis, (extent, step) in enumerate(zip(size, stride, strict=True)):
        shape = [1] * len(size)
        shape[axis] = extent
        where += (np.arange(extent, dtype=np.int32) * step).reshape(shape)
    return where


def _order(base: Aval) -> list[int]:
    """The axes of a dense tensor from outermost to innermost in memory."""
    stride = base.meta.stride
    return sorted(range(len(stride)), key=lambda axis: -stride[axis])


def _flat(x: jax.Array, base: Aval) -> jax.Array:
    return x.transpose(_order(base)).reshape(-1)


def _unflat(flat: jax.Array, base: Aval) -> jax.Array:
    order = _order(base)
    size = [base.meta.size[axis] for axis in order]
    return flat.reshape(size).transpose(np.argsort(order))


def _as_slices(
    base: Aval, size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> list[ViewOp] | None:
    """Write `as_strided` as slices, selections and a permutation, or None where it cannot be.

    Partitioners understand slices; they gather the whole array for an index list.
    """
    base_size, steps = base.meta.size, base.meta.stride
    if steps != contiguous_stride(base_size) or not base_size or 0 in size or 0 in base_size:
        return None
    start, rest = [], offset
    for step in steps:
        start.append(rest // step)
        rest %= step
    used: dict[int, tuple[int, int, int]] = {}
    for axis, (extent, step) in enumerate(zip(size, stride, strict=True)):
        if extent == 1:
            continue
        fits = [
            d
            for d in range(len(base_size))
            if d not in used
            and step > 0
            and step % steps[d] == 0
            and start[d] + (extent - 1) * (step // steps[d]) < base_size[d]
        ]
        if not fits:
            return None
        used[fits[0]] = (axis, extent, step // steps[fits[0]])
    if any(first >= extent for first, extent in zip(start, base_size, strict=True)):
        return None
    ops: list[ViewOp] = []
    for d in range(len(base_size)):
        _, extent, step = used.get(d, (0, 1, 1))
        ops.append(("slice", d, start[d], start[d] + (extent - 1) * step + 1, step))
    axes = sorted(used)
    ops.append(("reshape", tuple(used[d][1] for d in axes)))
    order = sorted(range(len(axes)), key=lambda index: used[axes[index]][0])
    ops.append(("permute", tuple(order)))
    ops.append(("reshape", size))
    return ops
