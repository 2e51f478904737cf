"""Marks: the requested sharding of a tensor's memory, and torch_xla's strings for shardings.

>>> from isoshard import P, make_mesh
>>> sharding = jax.sharding.NamedSharding(make_mesh((2, 4), ("x", "y")), P(None, "y"))
>>> spec_string(sharding, 2), sharding_type(sharding, 2)
('{devices=[1,4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}', <ShardingType.PARTIAL: 5>)

In these strings, as in torch_xla's, a device is its index in `jax.devices()`, and the replicas of a
block are in ascending order. (The strings of `isoshard.core` count along the mesh; the two differ
for a mesh that has its devices in another order.)

The sharding of the values may differ from the requested one: JAX has no buffers of unequal sizes,
and XLA's partitioner puts unequal blocks at wrong indices (`axis_types.dividing`), so an axis that
does not divide is replicated. `requested_sharding` returns the former.
"""

from __future__ import annotations

import enum
import functools
import math
import weakref
from typing import Any

import jax
import numpy as np
import torch

from isoshard.core.blocks.block_layout import BlockLayout
from isoshard.core.errors import ReplicationWarning
from isoshard.core.layout.axis_types import dividing
from isoshard.core.layout.mesh import mesh_of
from isoshard.core.layout.spec import SpecLike
from isoshard.core.layout.tiles import Tiles
from isoshard.core.layout.virtual_devices import Device
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.caches import cached
from isoshard.core.runtime.user_warnings import warn_user
from isoshard.torch_bridge._torch_internals.tensor_fields import PARAMETER_FIELD, gradient_hooks
from isoshard.torch_bridge.common.argument_types import DeviceTensor, LayoutLike
from isoshard.torch_bridge.engine.compiling.layout_constraints import constrain
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.recorder import recorder
from isoshard.torch_bridge.engine.recording.tensor_changes import namespace
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.engine.values.value import Aval, Storage, Value
from isoshard.torch_bridge.execution.runtime import PENDING

Sharding = jax.sharding.NamedSharding
Layout = Sharding | BlockLayout
Chunks = tuple[tuple[int, tuple[int, ...]], ...]
"""(axis, sizes of its shards), of some axes."""


class ShardingType(enum.IntEnum):
    """How a sharding divides a tensor, with torch_xla's values.

    Shardings of tensors here are replicated, tiled or partial.

    Attributes:
        REPLICATED: every device has all elements.
        MAXIMAL: one device has all elements.
        TUPLE: of several arrays.
        TILED: every device has a block of its own.
        MANUAL: each device has a value of its own.
        PARTIAL: each block is on several devices.
        UNKNOWN: not specified.

    Example:
        >>> import torch, isoshard.torch_bridge as xs
        >>> mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
        >>> t = xs.mark_sharding(torch.ones(8, 8, device="jax"), mesh, ("x", None))
        >>> t.sharding_type
        <ShardingType.PARTIAL: 5>
    """

    REPLICATED = 0
    MAXIMAL = 1
    TUPLE = 2
    TILED = 3
    MANUAL = 4
    PARTIAL = 5
    UNKNOWN = 6


# The requested sharding of memory with another one: uneven shardings; None after `clear`.
_REQUESTED: weakref.WeakKeyDictionary[Storage, Sharding | None] = weakref.WeakKeyDictionary()

# The sizes of the shards along axes that several mesh dimensions split one after the other.
_CHUNKS: weakref.WeakKeyDictionary[Storage, Chunks] = weakref.WeakKeyDictionary()

# The spec of a mark as torch_xla's scripts wrote it: axes by number, an entry for every axis.
_WRITTEN: weakref.WeakKeyDictionary[Storage, Any] = weakref.WeakKeyDictionary()


def placed(tensor: lazy_tensor.LazyTensor) -> Sharding | None:
    """The sharding that the buffers of a tensor have or will get, None if it is on no mesh."""
    return None if tensor._chain.ops else sharding_of_memory(tensor._storage)


def sharding_of_memory(storage: Storage) -> Sharding | None:
    """The sharding that the buffers of a tensor's memory have or will get; None on no mesh."""
    if storage.annotation is not None:
        return storage.annotation
    if storage.value.layout == sharding_ids.UNPLACED:
        return None
    layout = sharding_ids.as_named(storage.value.layout)
    sharding = layout.sharding if isinstance(layout, BlockLayout) else layout
    return sharding if isinstance(sharding, Sharding) else None


def requested_sharding(tensor: lazy_tensor.LazyTensor) -> Sharding | None:
    """The sharding that a tensor was marked with, else that of its buffers; None without one."""
    if _REQUESTED and not tensor._chain.ops and tensor._storage in _REQUESTED:
        return _REQUESTED[tensor._storage]
    return placed(tensor)


def marked(tensor: DeviceTensor) -> Sharding | None:
    """The sharding that a tensor's memory was marked with, or None."""
    if tensor._chain.ops:
        return None
    return _REQUESTED.get(tensor._storage) or tensor._storage.annotation


def written(tensor: lazy_tensor.LazyTensor) -> Any:
    """The spec of a mark as it was written, if it was noted; else None."""
    return _WRITTEN.get(tensor._storage) if _WRITTEN and not tensor._chain.ops else None


def note_written(tensor: lazy_tensor.LazyTensor, spec: SpecLike) -> None:
    """Record the spec of a tensor's mark for `written`."""
    if not tensor._chain.ops:
        _WRITTEN[tensor._storage] = spec


def chunks(tensor: lazy_tensor.LazyTensor) -> Chunks:
    """The axes with shards of unequal sizes, as recorded by `note_chunks`."""
    return _CHUNKS.get(tensor._storage, ()) if _CHUNKS and not tensor._chain.ops else ()


def note_chunks(tensor: lazy_tensor.LazyTensor, sizes: Chunks) -> None:
    """Record the sizes of the shards of a mark, where they are unequal and not padded."""
    if sizes and not tensor._chain.ops:
        _CHUNKS[tensor._storage] = sizes


def is_recorded(tensor: lazy_tensor.LazyTensor) -> bool:
    """Whether the memory's value is still to be computed."""
    array = tensor._storage.value.array
    return array is None or isinstance(array, Tracer)


def annotate(
    tensor: lazy_tensor.LazyTensor, sharding: Layout, *, requested: Sharding | None = None
) -> None:
    """Mark a tensor with a sharding; data moves with the next execution.

    Args:
        tensor: on the `jax` device.
        sharding: fits the tensor's rank, and splits its shape evenly; or blocks of given sizes.
        requested: the requested sharding, where some axis does not divide.
    """
    current = recorder()
    captured = current.capture is not None and not current.plans
    if is_recorded(tensor) or tensor._chain.ops or captured:
        constrain_in_place(tensor, sharding, requested)
        return
    lazy_tensor.move(tensor, sharding_ids.intern(sharding))
    PENDING.append(tensor._storage)
    keep(tensor, sharding, requested)


def constrain_in_place(
    tensor: lazy_tensor.LazyTensor, sharding: Layout, requested: Sharding | None
) -> None:
    """Constrain a tensor's value in the program being recorded, whatever its mark.

    Args:
        tensor: on the `jax` device.
        sharding: as for `annotate`.
        requested: as for `annotate`.
    """
    lazy_tensor.write(tensor, constrain(lazy_tensor.read(tensor), sharding_ids.intern(sharding)))
    if not tensor._chain.ops:
        keep(tensor, sharding, requested)


def constrained(
    tensor: lazy_tensor.LazyTensor, sharding: Sharding, requested: Sharding | None = None
) -> Any:
    """A new tensor with the same elements and another sharding; `tensor` is not modified.

    Args:
        tensor: on the `jax` device.
        sharding: as for `annotate`.
        requested: as for `annotate`.
    """
    value = constrain(lazy_tensor.read(tensor), sharding_ids.intern(sharding))
    result = lazy_tensor.fresh(Aval.contiguous(tuple(tensor.shape), tensor.dtype), value)
    keep(result, sharding, requested)
    return result


def keep(tensor: lazy_tensor.LazyTensor, sharding: Layout, requested: Sharding | None) -> None:
    """Record a mark in a tensor's memory, and constrain its gradients to it."""
    blocks = isinstance(sharding, BlockLayout)
    tensor._storage.annotation = sharding.sharding if blocks else sharding
    _WRITTEN.pop(tensor._storage, None)
    _CHUNKS.pop(tensor._storage, None)
    if requested is not None:
        _REQUESTED[tensor._storage] = requested
    else:
        _REQUESTED.pop(tensor._storage, None)
    keep_gradient_layout(tensor)


def mark_result(tensor: lazy_tensor.LazyTensor, layout: Layout) -> None:
    """Record the sharding of a new result, which the program that computes it will give it.

    Args:
        tensor: with memory of its own.
        layout: a sharding that divides, or blocks of given sizes.
    """
    value = lazy_tensor.read(tensor)
    if value.array is None:
        value.layout = sharding_ids.intern(layout)
    keep(tensor, layout, None)


def clear(tensor: lazy_tensor.LazyTensor) -> None:
    """Remove a tensor's mark, and replicate it over its mesh."""
    present = tensor._storage.annotation
    if present is None or tensor._chain.ops:
        return
    annotate(tensor, Sharding(present.mesh, jax.sharding.PartitionSpec()))
    tensor._storage.annotation = None
    _WRITTEN.pop(tensor._storage, None)
    _CHUNKS.pop(tensor._storage, None)
    _REQUESTED[tensor._storage] = None


def is_cleared(tensor: lazy_tensor.LazyTensor) -> bool:
    """Whether a tensor's memory was not marked since `clear`."""
    return _REQUESTED.get(tensor._storage, ...) is None


def is_on_host(tensor: lazy_tensor.LazyTensor) -> bool:
    """Whether the tensor's memory is on the host only."""
    return isinstance(tensor._storage.value.array, np.ndarray)


def annotated(
    x: torch.Tensor, value: Value, layout: LayoutLike, shape: tuple[int, ...]
) -> torch.Tensor:
    """A tensor of `value` with the class and `requires_grad` of `x`."""
    tensor = lazy_tensor.fresh(Aval.contiguous(shape, x.dtype), value)
    tensor._storage.annotation = layout.sharding if isinstance(layout, BlockLayout) else layout
    torch.Tensor.requires_grad_(tensor, x.requires_grad)
    if isinstance(x, torch.nn.Parameter):
        if PARAMETER_FIELD is None:
            return torch.nn.Parameter(tensor, x.requires_grad)
        namespace(tensor)[PARAMETER_FIELD] = True
    keep_gradient_layout(tensor)
    return tensor


def take_over(tensor: lazy_tensor.LazyTensor, before: Sharding | None) -> None:
    """Mark the new memory of a tensor as its old memory, unless it has a mark itself."""
    if before is None or marked(tensor) is not None:
        return
    shape = tuple(tensor.shape)
    fits = not tensor._chain.ops and len(before.spec) <= len(shape)
    if fits and dividing(before, shape) == before:
        (mark_result if tensor._storage.value.array is None else annotate)(tensor, before)
    elif any(before.spec):
        warn_user(
            f"tensor.data = ..: the new data of shape {shape} cannot be sharded as {before.spec} "
            f"like the old, so that sharding is lost. {_HOW_TO_SHARD}",
            ReplicationWarning,
        )


_HOW_TO_SHARD = "Shard the new data first, iso.shard(new, mesh, spec), or write it with copy_."


def copy_mark(source: lazy_tensor.LazyTensor, target: lazy_tensor.LazyTensor) -> None:
    """Give `target`, a copy of `source`, the same mark."""
    if source._storage in _REQUESTED:
        _REQUESTED[target._storage] = _REQUESTED[source._storage]
    note_chunks(target, chunks(source))


def keep_gradient_layout(tensor: lazy_tensor.LazyTensor) -> None:
    """Shard the gradients of a leaf as the leaf, and with them what optimizers make of them."""
    if tensor.requires_grad and is_leaf(tensor):
        if _constrain_gradient not in (gradient_hooks(tensor) or {}).values():
            tensor.register_post_accumulate_grad_hook(_constrain_gradient)


def is_leaf(tensor: lazy_tensor.LazyTensor) -> bool:
    """Whether a tensor is a leaf; False where `tensor.is_leaf` raises.

    It raises for one of several views of memory that was written to since. Sharding memory needs
    nothing of autograd, so the error is left to the operation that reads the view.
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def _constrain_gradient(leaf: Any) -> None:
    gradient = leaf.grad
    if isinstance(gradient, lazy_tensor.LazyTensor):
        sharded = gradient_sharded_as(leaf, gradient)
        if sharded is not gradient:
            leaf.grad = sharded


def gradient_sharded_as(leaf: DeviceTensor, gradient: DeviceTensor) -> torch.Tensor:
    """A gradient sharded as its leaf: itself, or a copy where it is a view.

    Args:
        leaf: a tensor on the device.
        gradient: of the leaf, of the same shape.
    """
    layout, requested = leaf._storage.value.layout, _REQUESTED.get(leaf._storage)
    if gradient._chain.ops:  # a view has no layout of its own
        marked = requested or leaf._storage.annotation is not None
        if gradient.requires_grad or not (marked or _is_split(layout)):
            return gradient
        gradient = gradient.clone()
    if requested and not gradient.requires_grad:
        if (
            _REQUESTED.get(gradient._storage, requested) != requested
        ):  # another leaf has the same gradient
            gradient = gradient.clone()
        copy_mark(leaf, gradient)
    value = gradient._storage.value
    if value.array is not None or value.layout == layout or layout == sharding_ids.UNPLACED:
        return gradient
    if value.layout == sharding_ids.UNPLACED:
        value.layout = layout
    elif gradient._storage.annotation is None and not gradient.requires_grad:
        lazy_tensor.write(gradient, constrain(value, layout))  # another leaf has the same gradient
    return gradient


def _is_split(layout_id: int) -> bool:
    """Whether a layout splits an axis."""
    return layout_id != sharding_ids.UNPLACED and any(
        getattr(sharding_ids.sharding(layout_id), "spec", ())
    )


@cached(4096)
def spec_string(sharding: Sharding, ndim: int) -> str:
    """A sharding as torch_xla writes it; see the module's description.

    Args:
        sharding: the sharding.
        ndim: rank of the tensor.
    """
    grid = groups(sharding, ndim)
    blocks, replicas = grid.shape[:-1], grid.shape[-1]
    if math.prod(blocks) == 1:
        return "{replicated}"
    shape = grid.shape if replicas > 1 else blocks
    tail = " last_tile_dim_replicate" if replicas > 1 else ""
    return f"{{devices=[{_join(shape)}]{_join(grid.ravel())}{tail}}}"


@cached(4096)
def sharding_type(sharding: Sharding, ndim: int) -> ShardingType:
    """Whether a sharding is replicated, tiled, or tiled and partly replicated."""
    tiles = Tiles.from_sharding(sharding, ndim)
    if math.prod(tiles.blocks) == 1:
        return ShardingType.REPLICATED
    return ShardingType.TILED if tiles.replicas == 1 else ShardingType.PARTIAL


@cached(4096)
def groups(sharding: Sharding, ndim: int) -> np.ndarray:
    """The ordinals of the devices of each block, in torch_xla's order.

    Returns:
        Integers of shape (blocks along each tensor axis .., replicas).
    """
    ordinals = np.array([ordinal(device) for device in mesh_of(sharding).devices.flat])
    return np.sort(ordinals[Tiles.from_sharding(sharding, ndim).grid], axis=-1)


@functools.cache
def ordinal(device: Device) -> int:
    """The index of a device in `jax.devices(platform)`."""
    return jax.devices(device.platform).index(device)


def _join(integers: Any) -> str:
    return ",".join(map(str, integers))
