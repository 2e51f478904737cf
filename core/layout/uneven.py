"""Unevenly sharded arrays: a padded JAX array with the valid size of each block.

JAX has buffers of equal blocks only. DTensor has blocks as `torch.chunk` splits: 5 rows over 4
devices are 2, 2, 1 and 0. Such a tensor is represented by an array of 8 rows, 2 per device, with
its true shape and the number of valid rows in each block:

>>> import jax
>>> import numpy as np
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> rows = np.array([0, 1, 2, 3, 4, -1, -1, -1], np.float32)
>>> padded = shard(rows, make_mesh((4,), ("x",)), ("x",))
>>> uneven = UnevenArray(padded, (5,), ((2, 2, 1, 0),))
>>> uneven
UnevenArray(float32[5] in float32[8], axis 0 in blocks of 2: 2, 2, 1, 0 valid; P('x',))
>>> jax.jit(lambda u: u.array.sum(where=u.mask()))(uneven).item()
10.0

Valid elements are first in their block, and blocks are in order. The padding's values are
unspecified: mask them before anything that mixes elements.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError
from isoshard.core.runtime._jax_internals.tracers import Tracer

from .axis_types import constrain, is_typed
from .partial_sums import stored

_FIX = (
    "compute with it in iso.domain.lift(f), where f is written for global arrays, or gather it "
    "first: iso.full(u)"
)
Sizes = tuple[tuple[int, ...] | None, ...]


@jax.tree_util.register_pytree_node_class
class UnevenArray:
    """A padded array, the true shape, and the valid sizes of its blocks. A pytree of one leaf.

    Args:
        array: of the padded shape: along an axis that does not divide, as many blocks of one size
            as `sizes` has entries.
        shape: the true global shape.
        sizes: per axis None (not padded), or the number of valid elements of each block.
        layout: the sharding of the padded array, for traced arrays; by default its own.

    Raises:
        ShardingError: the three do not match; all errors in one message.

    Example:
        >>> UnevenArray(jnp.zeros(8), (6,), ((2, 2, 1, 0),))
        Traceback (most recent call last):
            ...
        isoshard.core.errors.ShardingError: an array of shape (8,) is no padded form of shape (6,) with sizes ((2, 2, 1, 0),): axis 0 has 5 valid elements in its blocks, and 6 in the shape. Give the sizes that add up to the shape, each at most the size of a block.
    """  # noqa: E501

    __slots__ = ("array", "layout", "shape", "sizes")

    array: Any
    shape: tuple[int, ...]
    sizes: Sizes
    layout: NamedSharding | None

    def __init__(
        self,
        array: Any,
        shape: Sequence[int],
        sizes: Sequence[Sequence[int] | None],
        layout: NamedSharding | None = None,
    ) -> None:
        """Check that shapes and sizes match."""
        self.array = array
        self.layout = layout or layout_of(array)
        self.shape = tuple(map(int, shape))
        self.sizes = tuple(None if size is None else tuple(map(int, size)) for size in sizes)
        _check(tuple(array.shape), self.shape, self.sizes)

    @property
    def dtype(self) -> Any:
        """The dtype of the elements."""
        return self.array.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of valid elements."""
        return math.prod(self.shape)

    @property
    def sharding(self) -> Any:
        """The sharding of the padded array; of a traced one that it was created with, or None."""
        return self.layout if isinstance(self.array, Tracer) else self.array.sharding

    def _raise(self, *_: Any) -> Any:
        """Raise for operators that would compute with the padding."""
        raise TypeError(f"an UnevenArray has padding in its blocks, so {_FIX}")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __pow__ = __rpow__ = _raise
    __truediv__ = __rtruediv__ = __floordiv__ = __mod__ = __matmul__ = __rmatmul__ = _raise
    __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = _raise
    __array__ = __jax_array__ = _raise

    def __getattr__(self, name: str) -> Any:
        """Raise, with how to do what an array does."""
        hint = "" if name.startswith("_") else f": it has padding in its blocks, so {_FIX}"
        raise AttributeError(f"an UnevenArray has no {name!r}{hint}")

    def mask(self) -> jax.Array:
        """The mask of valid elements.

        Returns:
            Booleans of the padded shape, sharded as the array; inside `jax.jit` a traced value.

        Example:
            >>> UnevenArray(jnp.zeros((2, 4)), (2, 3), (None, (2, 1))).mask()
            Array([[ True,  True,  True, False],
                   [ True,  True,  True, False]], dtype=bool)
        """
        padded = tuple(self.array.shape)
        axis_masks: list[Any] = [
            _valid(extent, size).reshape((1,) * axis + (-1,) + (1,) * (self.ndim - axis - 1))
            for axis, (extent, size) in enumerate(zip(padded, self.sizes, strict=True))
            if size is not None
        ]
        array = self.array
        concrete = array.to_concrete_value() if isinstance(array, Tracer) else array
        if concrete is None:
            mask = jnp.broadcast_to(functools.reduce(jnp.logical_and, axis_masks, True), padded)
            sharding = jax.typeof(array).sharding
            return constrain(mask, stored(sharding)) if is_typed(sharding.mesh) else mask
        host_mask = np.broadcast_to(functools.reduce(np.logical_and, axis_masks, np.True_), padded)
        layout = stored(concrete.sharding)
        return jax.make_array_from_callback(padded, layout, lambda index: host_mask[index])

    def tree_flatten(self) -> tuple[tuple[Any], tuple[Any, ...]]:
        """The array, and the rest as static data."""
        return (self.array,), (self.shape, self.sizes, self.layout)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], leaves: Sequence[Any]) -> UnevenArray:
        """The same around another leaf, of any type."""
        result = object.__new__(cls)
        (result.array,) = leaves
        result.shape, result.sizes, result.layout = static
        layout = layout_of(result.array)
        if layout is not None and result.layout is not None and _has_moved(layout, result.layout):
            result.layout = layout  # on the same devices it is kept, so that treedefs are equal
        return result

    def __repr__(self) -> str:
        """Shapes, block sizes and layout; no elements."""
        dtype = getattr(self.array, "dtype", None)
        if dtype is None:  # a tree of something else
            return f"UnevenArray({self.array!r}, {self.shape}, {self.sizes})"
        padded = self.array.shape
        fields = [f"{_type(dtype, self.shape)} in {_type(dtype, padded)}"]
        fields += [
            f"axis {axis} in blocks of {extent // len(size)}: {', '.join(map(str, size))} valid"
            for axis, (extent, size) in enumerate(zip(padded, self.sizes, strict=True))
            if size is not None
        ]
        sharding = None if isinstance(self.array, Tracer) else self.array.sharding
        spec = f"; {sharding.spec}" if isinstance(sharding, NamedSharding) else ""
        return f"UnevenArray({', '.join(fields)}{spec})"


def is_uneven(x: Any) -> bool:
    """Whether it is an array in blocks; as `is_leaf`, so that trees keep it."""
    return isinstance(x, UnevenArray)


def padded_of(x: Any) -> Any:
    """The array of an UnevenArray, or the array itself."""
    return x.array if isinstance(x, UnevenArray) else x


def runs_of(range_: slice, extent: int, sizes: tuple[int, ...] | None) -> list[tuple[slice, slice]]:
    """The runs of valid elements of a buffer, along one axis.

    Args:
        range_: the buffer's slice of the padded axis.
        extent: of the padded axis.
        sizes: valid elements of each block; None without padding.

    Returns:
        Slices in the buffer and in the axis of the true size, as few as possible; an empty pair if
        nothing is valid.

    Example:
        >>> runs_of(slice(0, 4), 8, (2, 1, 0, 1))                     # two blocks, side by side
        [(slice(0, 3, None), slice(0, 3, None))]
        >>> runs_of(slice(4, 8), 8, (2, 1, 0, 1))                     # nothing, and one
        [(slice(2, 3, None), slice(3, 4, None))]
        >>> runs_of(slice(4, 6), 8, (2, 1, 0, 1))
        [(slice(0, 0, None), slice(3, 3, None))]
    """
    start, stop, _ = range_.indices(extent)
    if sizes is None:
        return [(slice(0, stop - start), slice(start, stop))]
    block = extent // len(sizes)
    begins = [0, *itertools.accumulate(sizes)]
    runs: list[tuple[int, int, int]] = []  # in the buffer, in the axis, how many
    for index in range(start // block, -(-stop // block)) if block else ():
        low, high = max(start, index * block), min(stop, index * block + sizes[index])
        if low >= high:
            continue
        at, first, count = low - start, begins[index] + low - index * block, high - low
        if runs and runs[-1][0] + runs[-1][2] == at:
            at, first, count = *runs[-1][:2], runs.pop()[2] + count
        runs.append((at, first, count))
    none = (0, begins[start // block] if block else 0, 0)
    return [(slice(at, at + n), slice(first, first + n)) for at, first, n in runs or [none]]


def layout_of(array: Any) -> NamedSharding | None:
    """The sharding of a concrete array over a mesh, its spec canonical; otherwise None.

    Example:
        >>> layout_of(jnp.zeros(3)) is None
        True
    """
    if not isinstance(array, jax.Array) or isinstance(array, Tracer):
        return None
    if not isinstance(array.sharding, NamedSharding):
        return None
    sharding = stored(array.sharding)
    entries = [e[0] if isinstance(e, tuple) and len(e) == 1 else e for e in sharding.spec]
    while entries and not entries[-1]:
        entries.pop()
    return NamedSharding(sharding.mesh, P(*(entry or None for entry in entries)))


def _has_moved(current: NamedSharding, recorded: NamedSharding) -> bool:
    """Whether an array is on other devices than recorded, or the recorded mesh was abstract."""
    return isinstance(recorded.mesh, AbstractMesh) or current.device_set != recorded.device_set


def _check(padded: tuple[int, ...], shape: tuple[int, ...], sizes: Sizes) -> None:
    if not len(padded) == len(shape) == len(sizes):
        errors = [f"they are of ranks {len(padded)}, {len(shape)} and {len(sizes)}"]
    else:
        errors = [
            error
            for axis, (have, want, size) in enumerate(zip(padded, shape, sizes, strict=True))
            for error in _axis_errors(axis, have, want, size)
        ]
    if errors:
        raise ShardingError(
            f"an array of shape {padded} is no padded form of shape {shape} with sizes {sizes}: "
            f"{'; '.join(errors)}. Give the sizes that add up to the shape, each at most the size "
            "of a block."
        )


def _axis_errors(axis: int, have: int, want: int, size: tuple[int, ...] | None) -> list[str]:
    if size is None:
        same = have == want
        return [] if same else [f"axis {axis} is not padded, and has {have} elements for {want}"]
    if not size or have % len(size):
        return [f"axis {axis} has {have} elements, which are no {len(size)} equal blocks"]
    block = have // len(size)
    errors = []
    if sum(size) != want:
        errors.append(
            f"axis {axis} has {sum(size)} valid elements in its blocks, and {want} in the shape"
        )
    if wrong := [count for count in size if not 0 <= count <= block]:
        errors.append(f"axis {axis} has blocks of {block} elements, of which {wrong} are valid")
    return errors


def _valid(extent: int, size: tuple[int, ...]) -> np.ndarray:
    """The mask of valid elements along one axis."""
    block = extent // len(size)
    return (np.arange(block) < np.array(size)[:, None]).reshape(-1)


def _type(dtype: Any, shape: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"
