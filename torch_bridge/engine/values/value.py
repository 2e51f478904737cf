"""Values and storages: what a tensor points at.

A `Value` is one immutable array. It is *recorded* (a place on a tape, not computed yet), *held on
the host* (a NumPy snapshot that no device has seen), or *placed* (a `jax.Array`). A `Storage` is
what torch calls a storage: several tensors may view it, and writing through any of them gives it a
new `Value`.

```
tensor --> Chain of view operations --> Storage --> Value (changes with every write)
tensor --------------------------------^
```
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import numpy as np
import torch

from isoshard.core.blocks.block_layout import BlockLayout
from isoshard.core.layout.axis_types import auto, under_auto
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.torch_bridge.common.dtypes import physical_dtype

from . import sharding_ids
from .metas import Meta

MOST_AXES = 64
"""Axes that NumPy's arrays have at most."""


class Aval:
    """An interned `Meta`: equal metas are one object, so they hash and compare by identity.

    That object lives as long as it has a reference.

    Attributes:
        meta: size, stride and logical dtype.
        physical: the dtype of the JAX buffer.
        token: shape and physical dtype; equal in avals that differ in stride only.
        root: the view chain of a storage of this aval, once it was requested.
        expanded: some elements are one in memory, as in a broadcast view.
    """

    __slots__ = ("__weakref__", "expanded", "meta", "physical", "root", "token")
    _interned: ClassVar[weakref.WeakValueDictionary[Any, Aval]] = weakref.WeakValueDictionary()

    def __init__(self, meta: Meta):
        """Use `Aval.of`, which interns."""
        if len(meta.size) > MOST_AXES:
            raise RuntimeError(
                f"a tensor of {len(meta.size)} axes cannot be on the jax device: NumPy's arrays, "
                f"and so JAX's, have {MOST_AXES} at most; merge some with reshape()"
            )
        self.meta = meta
        self.physical = physical_dtype(meta.dtype)
        self.token = (meta.size, self.physical)
        self.root: Any = None
        pairs = zip(meta.stride, meta.size, strict=True)
        self.expanded = 0 not in meta.size and any(
            step == 0 and extent > 1 for step, extent in pairs
        )

    @staticmethod
    def of(meta: Meta) -> Aval:
        """The one aval of `meta`.

        Raises:
            TypeError: JAX cannot store its dtype.
            RuntimeError: it has more axes than JAX's arrays have.
        """
        result = Aval._interned.get(meta)
        if result is None:
            with _INTERNING:
                result = Aval._interned.get(meta)
                if result is None:
                    result = Aval._interned[meta] = Aval(meta)
        return result

    @staticmethod
    def contiguous(size: tuple[int, ...], dtype: torch.dtype) -> Aval:
        """The aval of a row-major tensor."""
        return Aval.of(Meta(size, contiguous_stride(size), dtype))


class Taken:
    """The array of a value that tapes take as an input, kept though the value itself may die.

    A tape references an input's array, but not its `Value`: whether the value is still reachable is
    whether the `Value` is alive. If not, and no other tape needs it, its memory is donated.

    Attributes:
        value: weakly, the value.
        array: its array when a tape took it; None while no tape needs it.
        layout: as of the value then.
        memory: as of the value then.
        origin: as of the value then.
        shared: the buffer may have other references.
        tapes: ids of the tapes that need the array and have not been executed.
    """

    __slots__ = ("array", "layout", "memory", "origin", "shared", "tapes", "value")

    def __init__(self, value: Value):
        """Of a value that no tape has taken."""
        self.value = weakref.ref(value)
        self.array: Any = None
        self.layout = sharding_ids.UNPLACED
        self.memory = -1
        self.origin = ENGINE
        self.shared = False
        self.tapes: set[int] = set()

    def take(self, tape: Any, value: Value) -> None:
        """Let a tape need the array of a value that has one."""
        _TAKING.acquire()
        self.tapes.add(id(tape))
        self.array = value.array
        _TAKING.release()
        self.layout = value.layout
        self.memory = value.memory
        if type(value.array) is np.ndarray:
            self.origin = value.origin

    def let_go(self, tape: Any) -> None:
        """A tape needs it no more."""
        with _TAKING:
            self.tapes.discard(id(tape))
            if not self.tapes:
                self.array = None

    def value_or_self(self) -> Value | Taken:
        """The value, or if it is dead this object, which has the same attributes."""
        value = self.value()
        return self if value is None else value

    @property
    def is_free(self) -> bool:
        """Whether the only tape that needs the array may overwrite its memory."""
        return self.value() is None and not self.shared and len(self.tapes) == 1

    def revived(self) -> Value:
        """The value, made again if it is dead."""
        value = self.value()
        if value is None:
            value = Value(self.array, self.layout)
            value.memory, value.taken = self.memory, self
            if self.origin is not ENGINE:
                value.origin = self.origin
            self.value = weakref.ref(value)
        return value


_TAKING = threading.RLock()
_INTERNING = threading.RLock()
ENGINE = "(the engine)"
"""The origin of a value that no line of user code brought."""


class Value:
    """One immutable array.

    It is alive as long as it is referenced: by a storage, or by code that has read it.
    Tapes refer to values weakly, compute only those that are alive, and donate the memory of inputs
    that are not.

    Attributes:
        array: a `jax.Array`, an `UnevenArray`, a NumPy snapshot still on the host, or None while
            recorded.
        tape: where it was recorded, until it is computed.
        slot: its number there.
        layout: the requested (and once placed, the actual) layout; see `sharding_ids`.
        taken: what tapes reference that take it as an input; None if none has.
        memory: number of the storage it was last written to. A program's result takes over the
            buffer of the input with the same number.
    """

    __slots__ = ("__weakref__", "_origin", "array", "layout", "memory", "slot", "taken", "tape")
    _origin: str

    def __init__(
        self,
        array: Any = None,
        layout: int = sharding_ids.UNPLACED,
        tape: Any = None,
        slot: int = -1,
    ):
        """Hold `array`; a recorded value has a place on a tape instead."""
        self.array: Any = array
        self.layout = layout
        self.tape: Any = tape
        self.slot = slot
        self.taken: Taken | None = None
        self.memory = -1

    @staticmethod
    def of(array: jax.Array | UnevenArray, *, shared: bool = False) -> Value:
        """Hold a placed (or traced) array."""
        if isinstance(array, Tracer):
            value = Value(under_auto(array))
        else:
            value = Value(computed_on(array), placed_layout(array))
        value.shared = shared
        return value

    @staticmethod
    def handed(array: Any) -> Value:
        """The value of an array (or tracer) that may have other references, wherever it is."""
        value = Value(array)
        value.shared = not isinstance(array, Tracer)
        return value

    @property
    def shared(self) -> bool:
        """Whether this buffer may have other references, so that it is never donated."""
        return self.taken is not None and self.taken.shared

    @shared.setter
    def shared(self, shared: bool) -> None:
        if shared or self.taken is not None:
            self.as_taken().shared = shared

    @property
    def origin(self) -> str:
        """The line of user code that brought it from the host; `ENGINE` if none did."""
        return getattr(self, "_origin", ENGINE)

    @origin.setter
    def origin(self, line: str) -> None:
        self._origin = line

    def as_taken(self) -> Taken:
        """What tapes reference that take it as an input: one object for all of them."""
        if self.taken is None:
            with _TAKING:
                if self.taken is None:
                    self.taken = Taken(self)
        return self.taken

    @property
    def placed(self) -> bool:
        """Whether it is on devices in its requested layout."""
        array = self.array
        if array is None or isinstance(array, np.ndarray):
            return False
        return self.layout == sharding_ids.UNPLACED or sharding_ids.untyped(
            self.layout
        ) == placed_layout(array)


def computed_on(array: jax.Array | UnevenArray) -> Any:
    """The array as the engine stores it: under Auto axes, in the same buffers."""
    if isinstance(array, UnevenArray):
        same = under_auto(array.array)
        return array if same is array.array else UnevenArray(same, array.shape, array.sizes)
    mesh = getattr(array.sharding, "mesh", None)
    return array if mesh is None or auto(mesh) is mesh else under_auto(array)


def placed_layout(array: jax.Array | UnevenArray) -> int:
    """The layout number of an array; UNPLACED when JAX may still move it by itself."""
    if isinstance(array, UnevenArray):
        return sharding_ids.intern(BlockLayout.of(array))
    if isinstance(array.sharding, jax.sharding.SingleDeviceSharding):
        return sharding_ids.UNPLACED if not array.committed else sharding_ids.intern(array.sharding)
    return sharding_ids.intern(array.sharding)


class Storage:
    """Memory that tensors share: a value that writes replace.

    Attributes:
        value: the current value.
        annotation: the `NamedSharding` that a user requested, or None.
        aval: size, memory order and dtype of the whole storage, seen as one tensor.
        id: unlike that of any other storage.
    """

    __slots__ = ("__weakref__", "annotation", "aval", "id", "value")
    _count = itertools.count()

    def __init__(self, value: Value, aval: Aval):
        """A fresh storage of one tensor."""
        self.value = value
        self.id = next(Storage._count)
        value.memory = self.id
        self.annotation: jax.sharding.NamedSharding | None = None
        self.aval = aval

    def write(self, value: Value) -> None:
        """Replace the value; the layout of the memory is kept."""
        if value.layout == sharding_ids.UNPLACED:
            value.layout = self.value.layout
        value.memory = self.id
        self.value = value

    def moved(self, layout: int) -> Value:
        """Share the array of another value, which requests another layout; returns that.

        Both are shared if anybody else can see the old one.
        """
        old = self.value
        taken, last = old.taken, weakref.ref(old)
        new = Value(old.array, layout)
        new.memory = old.memory
        new.origin = old.origin
        new.shared = old.shared
        self.value = new
        del old
        last_value = last()
        if last_value is not None:
            last_value.shared = new.shared = True
        elif taken is not None and taken.tapes:
            taken.shared = new.shared = True
        return new

    def is_sole_reference(self) -> bool:
        """Whether nothing else references the value, so that its memory may be overwritten.

        The storage gives it up for another value with the same array: if it dies, it had no
        other reference.
        """
        value = self.value
        taken = value.taken
        if value.array is None or (taken is not None and (taken.shared or taken.tapes)):
            return False
        last = weakref.ref(value)
        self.value = new = Value(value.array, value.layout)
        new.memory = value.memory
        new.origin = value.origin
        del value, taken
        last_value = last()
        if last_value is None:
            return True
        self.value = last_value
        return False


def contiguous_stride(size: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, as torch computes them (an empty axis counts as one)."""
    stride, step = [], 1
    for extent in reversed(size):
        stride.append(step)
        step *= max(extent, 1)
    return tuple(reversed(stride))


def donated_error(shape: tuple[int, ...]) -> RuntimeError:
    """The error of reading a tensor whose array was donated.

    >>> import torch, isoshard as iso, isoshard.torch_bridge
    >>> t = torch.ones(8, device="jax")
    >>> _ = jax.jit(lambda x: x + 1, donate_argnums=0)(iso.to_jax(t))
    >>> t + 1
    Traceback (most recent call last):
        ...
    RuntimeError: the array behind a tensor of shape (8,) was donated: a jax.jit(.., donate_argnums=..) was given iso.to_jax(tensor), and has written over it. Go on with what that call returned, or donate a copy: iso.to_jax(tensor, copy=True)
    """  # noqa: E501
    return RuntimeError(
        f"the array behind a tensor of shape {shape} was donated: a jax.jit(.., donate_argnums=..) "
        "was given iso.to_jax(tensor), and has written over it. Go on with what that call "
        "returned, or donate a copy: iso.to_jax(tensor, copy=True)"
    )


def first_donated(arrays: Iterable[Any]) -> jax.Array | None:
    """The first of some arrays that was donated."""
    return next((x for x in arrays if isinstance(x, jax.Array) and x.is_deleted()), None)
