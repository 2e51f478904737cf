"""The bare lazy tensor: what the engine needs of a torch tensor on the `jax` device.

Users see its subclass `XLAShardedTensor`; the engine creates tensors of the class that was set by
`use_class`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from isoshard.core.runtime import metrics
from isoshard.core.runtime.private_names import Absent, or_absent
from isoshard.torch_bridge._torch_internals.dispatcher import DispatchKey, DispatchKeySet
from isoshard.torch_bridge._torch_internals.tensor_fields import (
    make_wrapper_subclass,
    no_torch_function,
)
from isoshard.torch_bridge.common.exchange import to_numpy
from isoshard.torch_bridge.engine.values.value import Aval, Storage, Value
from isoshard.torch_bridge.engine.values.views import Chain

from .memory_log import note_constant, visible
from .recipes import Recipe
from .recorder import Recorder, recorder
from .tensor_changes import TrackedTensor, namespace


class LazyTensor(TrackedTensor):
    """A view of a storage whose value JAX stores or will compute.

    Attributes:
        _storage: the memory.
        _chain: how this tensor views it.
        _aval: size, stride and dtype.
    """

    _storage: Storage
    _chain: Chain
    _aval: Aval

    __torch_function__ = no_torch_function


_CLASS: type[LazyTensor] = LazyTensor
_LAZY = torch.device("lazy", 0)
AUTOCAST: Any = or_absent(lambda: DispatchKeySet(DispatchKey.AutocastPrivateUse1))
"""The dispatch key that lets tensors take part in `torch.autocast("jax")`; idle outside it."""
_make = AUTOCAST if isinstance(AUTOCAST, Absent) else make_wrapper_subclass


def use_class(cls: type[LazyTensor]) -> None:
    """Make tensors of `cls` from now on."""
    global _CLASS
    _CLASS = cls


def use_dispatch(dispatch: Callable[..., Any]) -> None:
    """Send operations to `dispatch(cls, func, types, args, kwargs)`, without a frame between."""
    setattr(LazyTensor, "__torch_dispatch__", classmethod(dispatch))  # noqa: B010  (typed as final)


_used = False


def used() -> bool:
    """Whether there has been a tensor on the device in this process, or `choose` was called."""
    return _used


def choose() -> None:
    """Let the device count as used."""
    global _used
    _used = True


def new_tensor(aval: Aval, storage: Storage, chain: Chain, offset: int = 0) -> LazyTensor:
    """A tensor that views `storage` through `chain`."""
    global _used
    _used = True
    meta = aval.meta
    tensor = _make(
        _CLASS,
        meta.size,
        strides=meta.stride,
        storage_offset=offset,
        dtype=meta.dtype,
        device=_LAZY,
        _extra_dispatch_keys=AUTOCAST,
    )
    fields = namespace(tensor)
    fields["_storage"] = storage
    fields["_chain"] = chain
    fields["_aval"] = aval
    return tensor


def view_of(tensor: LazyTensor, aval: Aval, chain: Chain, offset: int) -> LazyTensor:
    """A tensor that shares the storage of `tensor`.

    In inference mode torch requires a view of an ordinary tensor to be an ordinary tensor.
    """
    if torch.is_inference_mode_enabled() and not tensor.is_inference():
        with torch.inference_mode(False):
            return new_tensor(aval, tensor._storage, chain, offset)
    return new_tensor(aval, tensor._storage, chain, offset)


def fresh(aval: Aval, value: Value, current: Recorder | None = None) -> LazyTensor:
    """A tensor with a storage of its own; `current` is `recorder()`, where that is known."""
    storage = Storage(value, aval)
    log = recorder().log if current is None else current.log
    if log is not None:
        log.created[id(storage)] = value.slot
    return new_tensor(aval, storage, aval.root or Chain.root(aval))


def adopt(tensor: LazyTensor, other: LazyTensor) -> None:
    """Make `tensor` view what `other` views (`set_`, `.data = ..`, `resize_`)."""
    # `.data = ..` also sets the sizes and strides that C++ keeps.
    torch.Tensor.data.__set__(tensor, other)  # pyrefly: ignore[missing-attribute]
    tensor._storage = other._storage
    tensor._chain = other._chain
    tensor._aval = other._aval


def note_operand(
    value: Value, tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Let a captured step take this value from a CPU tensor in every replay."""
    capture = recorder().capture
    if capture is not None:
        capture.operand(value, tensor, change)


def read(tensor: LazyTensor) -> Value:
    """The current value of a tensor."""
    current = recorder()
    storage = tensor._storage
    if current.log is not None:
        current.log.touch(storage)
    value = storage.value
    if value.array is None and value.tape is not current:
        value = visible(storage)
    chain = tensor._chain
    if not chain.ops:
        return value
    cached = current.view(value, chain)
    if cached is not None:
        return cached
    recipe = chain.recipes.get("read") or reading(chain)
    view = current.record(recipe, (value,))[0]
    recorder().keep_view(value, chain, view)
    return view


def reading(chain: Chain) -> Recipe:
    """What an entry computes that reads a view."""
    recipe = Recipe("view", lambda arrays, _scalars, _key: [chain.read(arrays[0])], 1, detail=chain)
    return chain.recipes.setdefault("read", recipe)


class WrittenView(NamedTuple):
    """The detail of a recipe that writes to a view.

    Attributes:
        chain: the view.
    """

    chain: Chain


def write(tensor: LazyTensor, value: Value, current: Recorder | None = None) -> None:
    """Replace the elements that `tensor` views; `current` is `recorder()`, where that is known."""
    current = recorder() if current is None else current
    storage, log = tensor._storage, current.log
    if log is not None:
        log.touch(storage)
    chain = tensor._chain
    if chain.ops:
        recipe = chain.recipes.get("write")
        if recipe is None:
            writing = Recipe(
                "write",
                lambda arrays, _scalars, _key: [chain.write(arrays[0], arrays[1])],
                1,
                detail=WrittenView(chain),
            )
            recipe = chain.recipes.setdefault("write", writing)
        memory = current.record(recipe, (visible(storage), value))[0]
        storage.write(memory)
        recorder().keep_view(memory, chain, value)
    else:
        storage.write(value)
    if log is not None:
        log.wrote(storage)


def move(tensor: LazyTensor, layout: int) -> None:
    """Ask for another layout of the computed value of a tensor that is all of its memory."""
    current = recorder()
    storage, log = tensor._storage, current.log
    if log is not None:
        log.touch(storage)
    if current.plans:  # there are no elements that would have to move
        storage.value.layout = current.meant(layout)
        return
    storage.moved(layout)
    if log is not None:
        log.wrote(storage)


def host_value(tensor: torch.Tensor, *, snapshot: bool = True) -> Value:
    """A CPU tensor's elements, to be placed when first needed.

    Args:
        tensor: a strided CPU tensor.
        snapshot: copy, so that later writes to `tensor` are not seen.

    Raises:
        TypeError: JAX has no such dtype (quantised, ..).
        OverflowError: 64-bit integers that do not fit, where they are kept in 32 bits.
    """
    aval = Aval.contiguous(tuple(tensor.shape), tensor.dtype)
    array = to_numpy(tensor.detach())
    if array.dtype != aval.physical:
        array = narrow(array, aval.physical, tensor.dtype)
    elif snapshot:
        array = np.array(array, copy=True, order="C")
    value = Value(np.ascontiguousarray(array).reshape(array.shape))
    value.origin = metrics.user_location()
    note_constant(value)
    return value


def narrow(array: np.ndarray, dtype: np.dtype, name: torch.dtype) -> np.ndarray:
    """Store 64-bit integers in 32 bits, if every value fits; see `dtypes.NARROW`."""
    if array.size:
        low, high = int(array.min()), int(array.max())
        bounds = np.iinfo(dtype)
        if low < bounds.min or high > bounds.max:
            raise OverflowError(
                f"a {name} tensor with values from {low} to {high} does not fit {dtype.name}, "
                "in which 64-bit integers are kept as XLA_USE_32BIT_LONG is set; unset it"
            )
    return array.astype(dtype)
