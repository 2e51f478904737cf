"""Values that enter and leave a JAX trace: arrays as tensors, tensors as arrays, PRNG keys."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding

from isoshard.core.errors import CopyError
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.transfer.exchange import to_jax
from isoshard.torch_bridge.common.argument_types import ArrayLike, Leaf
from isoshard.torch_bridge.common.dtypes import logical_dtype
from isoshard.torch_bridge.engine.compiling import input_placement
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.values.metas import Meta
from isoshard.torch_bridge.engine.values.value import Aval, Value
from isoshard.torch_bridge.framework.framework import Torch
from isoshard.torch_bridge.layout.widths import astype, for_jax

ShardingById = dict[int, NamedSharding]
"""By `id` of an array, its sharding on the user's mesh."""
DECLARED: weakref.WeakKeyDictionary[Value, NamedSharding] = weakref.WeakKeyDictionary()
"""Declared shardings on the user's mesh: of torch code's arguments, of typed functions' results."""


def wrap(
    leaf: Leaf,
    dtype: torch.dtype | None = None,
    sharding: NamedSharding | None = None,
    like: torch.Tensor | None = None,
) -> Any:
    """A tensor over an array or tracer.

    Args:
        leaf: a `jax.Array`, a NumPy array, a tensor on any device, or anything else.
        dtype: the logical dtype; that of the array if not given.
        sharding: the array's on the user's mesh, if that has Explicit axes.
        like: a tensor whose dtype and memory order it has.

    Returns:
        A tensor on the `jax` device; what is neither array nor tensor as it is.

    Raises:
        CopyError: a tensor was computed from others that require grad.
    """
    if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
        raise CopyError(_HAS_GRAPH.format(tuple(leaf.shape)))
    if isinstance(leaf, lazy_tensor.LazyTensor):
        return leaf
    if isinstance(leaf, torch.Tensor):
        with jax.ensure_compile_time_eval():
            leaf, dtype = Torch().array(leaf.detach()), leaf.dtype
    if isinstance(leaf, np.ndarray):
        with jax.ensure_compile_time_eval():
            leaf = to_jax(leaf)
    if isinstance(leaf, UnevenArray):
        raise TypeError(
            f"a torch function takes arrays in blocks of equal sizes, not {leaf}; compute in its "
            "blocks with iso.domain.lift(function)(..)"
        )
    if not isinstance(leaf, jax.Array):
        return leaf
    aval = aval_of(leaf, dtype, like)
    value = Value.handed(leaf if leaf.dtype == aval.physical else astype(leaf, aval.physical))
    if sharding is not None:
        DECLARED[value] = sharding
    return lazy_tensor.fresh(aval, value)


def aval_of(
    array: ArrayLike, dtype: torch.dtype | None = None, like: torch.Tensor | None = None
) -> Aval:
    """The aval of a tensor over an array.

    Args:
        array: or a tracer.
        dtype: the logical dtype; that of the array if not given.
        like: a tensor whose dtype and memory order it has.

    Raises:
        TypeError: a size is a symbol of `jax.export`.
    """
    size = tuple(array.shape)
    if not all(isinstance(extent, int) for extent in size):
        raise TypeError(_SYMBOLIC.format(size))
    if like is not None:
        return Aval.of(Meta.of(torch.empty_like(like, device="meta")))
    return Aval.contiguous(size, dtype or logical_dtype(array.dtype))


_HAS_GRAPH = (
    "a tensor of shape {} was computed from tensors that require grad, and JAX would not see the "
    "graph; pass x.detach(), or call the module in torch"
)
_SYMBOLIC = (
    "torch code is recorded for static shapes, and an argument has the shape {}; export it for "
    "each size, or pass numbers in place of jax.export.symbolic_shape"
)


def unwrap(leaf: Leaf) -> Any:
    """The array or tracer of a tensor on any device, as JAX has it; anything else as it is."""
    if isinstance(leaf, lazy_tensor.LazyTensor):
        return for_jax(array_of(leaf), name="a result")
    return constant(leaf) if isinstance(leaf, torch.Tensor) else leaf


def constant(tensor: torch.Tensor, name: str = "tensor") -> jax.Array:
    """The elements of a tensor in JAX, also while JAX traces."""
    with jax.ensure_compile_time_eval():
        return Torch().to_jax(tensor.detach(), name=name)


def array_of(tensor: lazy_tensor.LazyTensor) -> jax.Array:
    """The array or tracer of a tensor on the `jax` device."""
    value = lazy_tensor.read(tensor)
    array = value.array
    if isinstance(array, UnevenArray):
        return input_placement.array_of(value)
    if not isinstance(array, Tracer | np.ndarray):
        value.shared = True  # the function may keep a reference, so its buffer is never donated
    if not isinstance(array, np.ndarray):
        return array
    with jax.enable_x64(True):
        return jnp.asarray(array)


def keys(rng: jax.Array | None) -> Iterator[jax.Array] | None:
    """PRNG keys for one operation after the other, those of a `Subprogram`.

    Args:
        rng: a key to begin with; None gives none.
    """
    if rng is None:
        return None

    return (jax.random.fold_in(rng, index) for index in itertools.count())


@dataclasses.dataclass(frozen=True)
class Result:
    """A tensor that torch code returned.

    Attributes:
        array: its elements.
        mark: the layout that it was marked with, or None.
    """

    array: Any
    mark: NamedSharding | None

    @staticmethod
    def of(leaf: Leaf, array: ArrayLike | None = None) -> Any:
        """A `Result` of a tensor; anything else as it is.

        Args:
            leaf: a tensor, or anything else.
            array: its elements, where they are computed already.
        """
        if not isinstance(leaf, torch.Tensor):
            return leaf
        mark = None
        if isinstance(leaf, lazy_tensor.LazyTensor) and not leaf._chain.ops:
            mark = leaf._storage.annotation
        return Result(unwrap(leaf) if array is None else array, mark)
