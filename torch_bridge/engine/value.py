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
from typing import Any, ClassVar

import jax
import numpy as np
import torch
from jax.core import Tracer

from isoshard.core.domain import BlockLayout
from isoshard.core.uneven import UnevenArray
from isoshard.torch_bridge.dtypes import physical_dtype

from . import layouts
from .metas import Meta


class Aval:
    """An interned `Meta`: equal metas are one object, so they hash and compare by identity.

    Attributes:
        meta: size, stride and logical dtype.
        physical: the dtype of the JAX buffer.
        token: an interned (shape, physical dtype) pair, shared by avals that differ in stride.
    """

    __slots__ = ("meta", "physical", "root", "token")
    _known: ClassVar[dict[Any, Aval]] = {}
    _tokens: ClassVar[dict[Any, tuple[tuple[int, ...], np.dtype]]] = {}

    def __init__(self, meta: Meta):
        """Use `Aval.of`, which interns."""
        self.meta = meta
        self.physical = physical_dtype(meta.dtype)
        token = (meta.size, self.physical)
        self.token = Aval._tokens.setdefault(token, token)
        self.root: Any = None

    @staticmethod
    def of(meta: Meta) -> Aval:
        """The one aval of `meta`.

        Raises:
            TypeError: JAX cannot store its dtype.
        """
        key = (meta, physical_dtype(torch.int64))  # jax_enable_x64 may be switched on
        found = Aval._known.get(key)
        if found is None:
            found = Aval._known[key] = Aval(meta)
        return found

    @staticmethod
    def contiguous(size: tuple[int, ...], dtype: torch.dtype) -> Aval:
        """The aval of a row-major tensor."""
        return Aval.of(Meta(size, contiguous_stride(size), dtype))


def check_storable(meta: Meta) -> None:
    """Refuse a tensor whose dtype would silently lose precision.

    Raises:
        RuntimeError: it is float64 or complex128, and `jax_enable_x64` is off.
    """
    if meta.dtype in (torch.float64, torch.complex128):
        if physical_dtype(meta.dtype).itemsize < meta.dtype.itemsize:
            raise RuntimeError(too_wide(meta.dtype))


def too_wide(dtype: torch.dtype) -> str:
    """The message for a dtype that needs 64-bit arithmetic."""
    return (
        f"{dtype} needs 64-bit arithmetic, which is off; switch it on with "
        'jax.config.update("jax_enable_x64", True), or convert with .float()'
    )


class Value:
    """One immutable array.

    Attributes:
        array: a `jax.Array`, an `UnevenArray`, a NumPy snapshot still on the host, or None while
            recorded.
        tape: the tape that knows it: as a result to be computed, or as an input.
        slot: its number there.
        layout: the wanted (and once placed, the actual) layout; see `layouts`.
        shared: somebody else may hold this buffer, so it is never donated.
        memory: number of the storage it was last written to. A program's result takes over the
            buffer of the input with the same number.
        origin: the line of user code that brought it, only for a snapshot on the host.
    """

    __slots__ = ("array", "layout", "memory", "origin", "shared", "slot", "tape")
    origin: str

    def __init__(self, array: Any = None, layout: int = layouts.UNPLACED):
        """Hold `array`; a recorded value is made by a tape."""
        self.array: Any = array
        self.layout = layout
        self.tape: Any = None
        self.slot = -1
        self.shared = False
        self.memory = -1

    @staticmethod
    def of(array: jax.Array | UnevenArray, *, shared: bool = False) -> Value:
        """Hold a placed (or traced) array."""
        value = Value(array)
        if not isinstance(array, Tracer):
            value.layout = placed_layout(array)
        value.shared = shared
        return value

    @property
    def placed(self) -> bool:
        """Whether a device holds it in its wanted layout."""
        array = self.array
        if array is None or isinstance(array, np.ndarray):
            return False
        return self.layout == placed_layout(array) or self.layout == layouts.UNPLACED


def placed_layout(array: jax.Array | UnevenArray) -> int:
    """The layout number of an array; UNPLACED when JAX may still move it by itself."""
    if isinstance(array, UnevenArray):
        return layouts.intern(BlockLayout.of(array))
    if isinstance(array.sharding, jax.sharding.SingleDeviceSharding):
        return layouts.UNPLACED if not array.committed else layouts.intern(array.sharding)
    return layouts.intern(array.sharding)


class Storage:
    """Memory that tensors share: a value that writes replace.

    Attributes:
        value: the current value.
        annotation: the `NamedSharding` a user asked for, or None.
        aval: size, memory order and dtype of the whole storage, seen as one tensor.
        number: unlike that of any other storage.
    """

    __slots__ = ("__weakref__", "annotation", "aval", "number", "value")
    _count = itertools.count()

    def __init__(self, value: Value, aval: Aval):
        """A fresh storage of one tensor."""
        self.value = value
        self.number = next(Storage._count)
        value.memory = self.number
        self.annotation: jax.sharding.NamedSharding | None = None
        self.aval = aval

    def write(self, value: Value) -> None:
        """Replace the value; the layout of the memory stays."""
        if value.layout == layouts.UNPLACED:
            value.layout = self.value.layout
        value.memory = self.number
        self.value = value


def contiguous_stride(size: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, as torch computes them (an empty axis counts as one)."""
    stride, step = [], 1
    for extent in reversed(size):
        stride.append(step)
        step *= max(extent, 1)
    return tuple(reversed(stride))
