"""Marks: the layout a user asked for, kept with a tensor's memory, and torch_xla's words for it.

>>> from isoshard import P, make_mesh
>>> sharding = jax.sharding.NamedSharding(make_mesh((2, 4), ("x", "y")), P(None, "y"))
>>> spec_string(sharding, 2), sharding_type(sharding, 2)
('{devices=[1,4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}', <ShardingType.PARTIAL: 5>)

In these strings, as in torch_xla's, a device is its place in `jax.devices()`, and the devices that
hold copies of one block are in ascending order. (The strings of `isoshard.core` count along the
mesh; the two differ for a mesh that takes its devices in another order.)

The layout of the values may be another than the one asked for: JAX has no buffers of unequal
pieces, and XLA's partitioner puts unequal blocks in wrong places (`axis_types.dividing`), so an
axis that does not divide stays whole. `asked` gives the former.
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
from isoshard.torch_bridge.engine.values import layout_numbers
from isoshard.torch_bridge.engine.values.value import Aval, Storage, Value
from isoshard.torch_bridge.execution.runtime import PENDING

Sharding = jax.sharding.NamedSharding
Layout = Sharding | BlockLayout
Chunks = tuple[tuple[int, tuple[int, ...]], ...]
"""Some axes, each with the sizes of its pieces."""


class ShardingType(enum.IntEnum):
    """How a layout divides a tensor, with torch_xla's numbers.

    The layouts of tensors here are replicated, tiled or partial.

    Attributes:
        REPLICATED: every device holds the whole.
        MAXIMAL: one device holds the whole.
        TUPLE: of several arrays.
        TILED: every device holds a block of its own.
        MANUAL: each device holds a value of its own.
        PARTIAL: several devices hold each block.
        UNKNOWN: nothing is known.

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


# What was asked for memory that lies otherwise: uneven layouts, and None after `clear`.
_ASKED: weakref.WeakKeyDictionary[Storage, Sharding | None] = weakref.WeakKeyDictionary()

# The sizes of the pieces along axes that several mesh dimensions split one after the other.
_CHUNKS: weakref.WeakKeyDictionary[Storage, Chunks] = weakref.WeakKeyDictionary()

# The spec of a mark as torch_xla's scripts wrote it: axes by number, an entry for every axis.
_WRITTEN: weakref.WeakKeyDictionary[Storage, Any] = weakref.WeakKeyDictionary()


def placed(tensor: lazy_tensor.LazyTensor) -> Sharding | None:
    """The layout that the buffers of a tensor have or will get, None if it is on no mesh."""
    return None if tensor._chain.ops else sharding_of_memory(tensor._storage)


def sharding_of_memory(storage: Storage) -> Sharding | None:
    """The layout that the buffers of a tensor's memory have or will get; None on no mesh."""
    if storage.annotation is not None:
        return storage.annotation
    if storage.value.layout == layout_numbers.UNPLACED:
        return None
    found = layout_numbers.as_named(storage.value.layout)
    found = found.sharding if isinstance(found, BlockLayout) else found
    return found if isinstance(found, Sharding) else None


def asked(tensor: lazy_tensor.LazyTensor) -> Sharding | None:
    """The layout that a tensor was marked with, else that of its buffers; None without one."""
    if _ASKED and not tensor._chain.ops and tensor._storage in _ASKED:
        return _ASKED[tensor._storage]
    return placed(tensor)


def marked(tensor: DeviceTensor) -> Sharding | None:
    """The layout that a tensor's memory was marked with, None if nobody has."""
    if tensor._chain.ops:
        return None
    return _ASKED.get(tensor._storage) or tensor._storage.annotation


def written(tensor: lazy_tensor.LazyTensor) -> Any:
    """The spec that a mark was written with, where it was noted; else None."""
    return _WRITTEN.get(tensor._storage) if _WRITTEN and not tensor._chain.ops else None


def note_written(tensor: lazy_tensor.LazyTensor, spec: SpecLike) -> None:
    """Let `written` tell the spec of a mark that the tensor has."""
    if not tensor._chain.ops:
        _WRITTEN[tensor._storage] = spec


def chunks(tensor: lazy_tensor.LazyTensor) -> Chunks:
    """The axes whose pieces `note_chunks` has told."""
    return _CHUNKS.get(tensor._storage, ()) if _CHUNKS and not tensor._chain.ops else ()


def note_chunks(tensor: lazy_tensor.LazyTensor, sizes: Chunks) -> None:
    """Say how large the pieces of a mark are, where they are not of one size and filled up."""
    if sizes and not tensor._chain.ops:
        _CHUNKS[tensor._storage] = sizes


def is_recorded(tensor: lazy_tensor.LazyTensor) -> bool:
    """Whether the memory's value is still to be computed."""
    array = tensor._storage.value.array
    return array is None or isinstance(array, Tracer)


def annotate(
    tensor: lazy_tensor.LazyTensor, sharding: Layout, *, ask: Sharding | None = None
) -> None:
    """Ask for a layout; the data follows with the next execution.

    Args:
        tensor: on the `jax` device.
        sharding: fits the tensor's rank, and splits its shape evenly; or blocks of given sizes.
        ask: the layout that was meant, where some axis does not divide.
    """
    here = recorder()
    captured = here.capture is not None and not here.plans
    if is_recorded(tensor) or tensor._chain.ops or captured:
        constrain_in_place(tensor, sharding, ask)
        return
    lazy_tensor.move(tensor, layout_numbers.intern(sharding))
    PENDING.append(tensor._storage)
    keep(tensor, sharding, ask)


def constrain_in_place(
    tensor: lazy_tensor.LazyTensor, sharding: Layout, ask: Sharding | None
) -> None:
    """Lay a tensor's value out in the program being recorded, over whatever mark it has.

    Args:
        tensor: on the `jax` device.
        sharding: as for `annotate`.
        ask: as for `annotate`.
    """
    lazy_tensor.write(tensor, constrain(lazy_tensor.read(tensor), layout_numbers.intern(sharding)))
    if not tensor._chain.ops:
        keep(tensor, sharding, ask)


def laid_out(
    tensor: lazy_tensor.LazyTensor, sharding: Sharding, ask: Sharding | None = None
) -> Any:
    """A new tensor with the same elements in another layout; `tensor` stays as it is.

    Args:
        tensor: on the `jax` device.
        sharding: as for `annotate`.
        ask: as for `annotate`.
    """
    value = constrain(lazy_tensor.read(tensor), layout_numbers.intern(sharding))
    result = lazy_tensor.fresh(Aval.contiguous(tuple(tensor.shape), tensor.dtype), value)
    keep(result, sharding, ask)
    return result


def keep(tensor: lazy_tensor.LazyTensor, sharding: Layout, ask: Sharding | None) -> None:
    """Note a mark in a tensor's memory, and let gradients follow it."""
    blocks = isinstance(sharding, BlockLayout)
    tensor._storage.annotation = sharding.sharding if blocks else sharding
    _WRITTEN.pop(tensor._storage, None)
    _CHUNKS.pop(tensor._storage, None)
    if ask is not None:
        _ASKED[tensor._storage] = ask
    else:
        _ASKED.pop(tensor._storage, None)
    keep_gradient_layout(tensor)


def lies(tensor: lazy_tensor.LazyTensor, layout: Layout) -> None:
    """Note how a new result lies: the program that will compute it lays it out so.

    Args:
        tensor: with memory of its own.
        layout: a sharding that divides, or blocks of given sizes.
    """
    value = lazy_tensor.read(tensor)
    if value.array is None:
        value.layout = layout_numbers.intern(layout)
    keep(tensor, layout, None)


def clear(tensor: lazy_tensor.LazyTensor) -> None:
    """Forget a tensor's mark, and make it whole on every device of its mesh."""
    present = tensor._storage.annotation
    if present is None or tensor._chain.ops:
        return
    annotate(tensor, Sharding(present.mesh, jax.sharding.PartitionSpec()))
    tensor._storage.annotation = None
    _WRITTEN.pop(tensor._storage, None)
    _CHUNKS.pop(tensor._storage, None)
    _ASKED[tensor._storage] = None


def is_cleared(tensor: lazy_tensor.LazyTensor) -> bool:
    """Whether `clear` was the last that was said of the layout of a tensor's memory."""
    return _ASKED.get(tensor._storage, ...) is None


def is_on_host(tensor: lazy_tensor.LazyTensor) -> bool:
    """Whether no device has seen the tensor's memory yet."""
    return isinstance(tensor._storage.value.array, np.ndarray)


def annotated(
    x: torch.Tensor, value: Value, layout: LayoutLike, shape: tuple[int, ...]
) -> torch.Tensor:
    """A tensor of `value` in the place of `x`; being a parameter and `requires_grad` are kept."""
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
    """Lay memory that a tensor was given out as what it had before, unless it has a mark itself.

    Args:
        tensor: with the new memory.
        before: the mark of the memory that it had.
    """
    if before is None or marked(tensor) is not None:
        return
    shape = tuple(tensor.shape)
    fits = not tensor._chain.ops and len(before.spec) <= len(shape)
    if fits and dividing(before, shape) == before:
        (lies if tensor._storage.value.array is None else annotate)(tensor, before)
    elif any(before.spec):
        warn_user(
            f"tensor.data = ..: the new data of shape {shape} cannot be laid out by {before.spec} "
            f"as the old, so that layout is lost. {_LAY_OUT}",
            ReplicationWarning,
        )


_LAY_OUT = "Lay the new data out first, iso.shard(new, mesh, spec), or write it with copy_."


def copy_mark(source: lazy_tensor.LazyTensor, target: lazy_tensor.LazyTensor) -> None:
    """Let `target`, a copy of `source`, be marked as that."""
    if source._storage in _ASKED:
        _ASKED[target._storage] = _ASKED[source._storage]
    note_chunks(target, chunks(source))


def keep_gradient_layout(tensor: lazy_tensor.LazyTensor) -> None:
    """Lay the gradients of a leaf out as the leaf, and with them what optimizers make of them."""
    if tensor.requires_grad and is_leaf(tensor):
        if _lay_out_gradient not in (gradient_hooks(tensor) or {}).values():
            tensor.register_post_accumulate_grad_hook(_lay_out_gradient)


def is_leaf(tensor: lazy_tensor.LazyTensor) -> bool:
    """Whether no operation made it; of some views torch no longer says so, as of no leaf.

    It refuses for one of several views of memory that was written to since. To lay out memory asks
    nothing of autograd, so this is for the operation to say that reads the view.
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def _lay_out_gradient(leaf: Any) -> None:
    held = leaf.grad
    if isinstance(held, lazy_tensor.LazyTensor):
        laid = laid_out_as(leaf, held)
        if laid is not held:
            leaf.grad = laid


def laid_out_as(leaf: DeviceTensor, held: lazy_tensor.LazyTensor) -> torch.Tensor:
    """A gradient laid out as the leaf that it is of: itself, or a copy where it is a view.

    Args:
        leaf: a tensor on the device.
        held: its gradient, of the same shape.
    """
    gradient: Any = held
    layout, meant = leaf._storage.value.layout, _ASKED.get(leaf._storage)
    if gradient._chain.ops:  # a view has no layout of its own
        marked = meant or leaf._storage.annotation is not None
        if gradient.requires_grad or not (marked or _is_split(layout)):
            return gradient
        gradient = gradient.clone()
    if meant and not gradient.requires_grad:
        if _ASKED.get(gradient._storage, meant) != meant:  # another leaf has the same gradient
            gradient = gradient.clone()
        copy_mark(leaf, gradient)
    value = gradient._storage.value
    if value.array is not None or value.layout == layout or layout == layout_numbers.UNPLACED:
        return gradient
    if value.layout == layout_numbers.UNPLACED:
        value.layout = layout
    elif gradient._storage.annotation is None and not gradient.requires_grad:
        lazy_tensor.write(gradient, constrain(value, layout))  # another leaf has the same gradient
    return gradient


def _is_split(number: int) -> bool:
    """Whether a layout splits an axis."""
    return number != layout_numbers.UNPLACED and any(
        getattr(layout_numbers.sharding(number), "spec", ())
    )


@cached(4096)
def spec_string(sharding: Sharding, ndim: int) -> str:
    """Write a layout as torch_xla does; see the module's description.

    Args:
        sharding: the layout.
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
    """Whether a layout is replicated, tiled, or tiled and partly replicated."""
    tiles = Tiles.from_sharding(sharding, ndim)
    if math.prod(tiles.blocks) == 1:
        return ShardingType.REPLICATED
    return ShardingType.TILED if tiles.replicas == 1 else ShardingType.PARTIAL


@cached(4096)
def groups(sharding: Sharding, ndim: int) -> np.ndarray:
    """The devices of each block, as torch_xla numbers and orders them.

    Returns:
        Integers of shape (blocks along each tensor axis .., replicas).
    """
    numbers = np.array([ordinal(device) for device in mesh_of(sharding).devices.flat])
    return np.sort(numbers[Tiles.from_sharding(sharding, ndim).grid], axis=-1)


@functools.cache
def ordinal(device: Device) -> int:
    """A device's place among all devices of its kind."""
    return jax.devices(device.platform).index(device)


def _join(numbers: Any) -> str:
    return ",".join(map(str, numbers))
