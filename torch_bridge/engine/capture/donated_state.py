"""State that a captured step owns between its runs and donates to the next one.

A step over 1,000 parameters would have to test before each run where their arrays are and whether
they have other references, and to store 1,000 results. But between two runs hardly any of them is
read. So the step owns what it wrote: the storage becomes an `OwnedStorage`, whose value is a
property. Reading or replacing the value moves the array out of the step, which takes it back in its
next run.

A step compiled with `repeat="auto"` takes the weights of one name in all layers as one array with a
leading axis of layers, and returns the new ones so. Between runs they remain stacked, and each
layer's storage is an `OwnedStorage`:

```
layers.0.weight --> Storage --> OwnedValue(0) --\\
layers.1.weight --> Storage --> OwnedValue(1) ---> LayerStack.array (2, ..)
```

Reading a layer's value gives a slice, a counted copy, and the stack remains valid. Writing to a
layer takes it out, and the next run puts it in again. A stack belongs to the storages in it, not to
a program: a training step and an evaluation of the same layers share it. When all layers have been
read it is dropped, and made again when it is needed, so that state is not stored twice for long.
"""

from __future__ import annotations

import collections
import contextlib
import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.runtime import metrics
from isoshard.core.runtime.caches import PROGRAMS, cached
from isoshard.torch_bridge.engine.compiling.loop_layouts import stacked_layout
from isoshard.torch_bridge.engine.recording.memory_log import visible
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.engine.values.value import Storage, Value

_OWNERSHIP = threading.RLock()
"""Locked while a step takes or gives up ownership of arrays, never while a program runs."""


class OwnedValue(Value):
    """The value of a storage whose array a step owns: it has no other reference.

    Attributes:
        owner: the arrays of the step, or the `LayerStack`; None once the value was read.
        index: of its array in the owner.
    """

    __slots__ = ("index", "owner")

    def __init__(self, layout: int, owner: Any, index: int):
        """See the class."""
        super().__init__(None, layout)
        self.owner, self.index = owner, index


class _OwnedArrays:
    """The arrays that a step owns. It refers to no storage, so there is no reference cycle.

    Attributes:
        arrays: of each storage; None if it moved out.
        moved_out: indices of the storages whose arrays the step has to acquire again.
    """

    __slots__ = ("arrays", "moved_out")
    peekable = True
    """Whether `peek` can read an array without moving it out."""

    def __init__(self, size: int):
        self.arrays: list[Any] = [None] * size
        self.moved_out = collections.deque(range(size))

    def release(self, value: OwnedValue) -> None:
        """Move an array to its value."""
        value.array, self.arrays[value.index] = self.arrays[value.index], None
        self.moved_out.append(value.index)


def _set_class(storage: Any, cls: type[Storage]) -> None:
    """Change the class of a storage to one with the same fields."""
    storage.__class__ = cls


def _take(storage: Storage) -> Value:
    with _OWNERSHIP:
        value = raw_value(storage)
        if isinstance(storage, OwnedStorage):
            value.owner.release(value)
            value.owner = None
            _set_class(storage, Storage)
        return value


def _replace(storage: Storage, value: Value) -> None:
    with _OWNERSHIP:
        _take(storage)
        storage.value = value


def _annotate(storage: Storage, annotation: Any) -> None:
    with _OWNERSHIP:
        _take(storage)
        storage.annotation = annotation


_ANNOTATION: Any = Storage.__dict__["annotation"]


class OwnedStorage(Storage):
    """A storage that a captured step wrote and that was not read since."""

    __slots__ = ()
    value: Any = property(_take, _replace)
    annotation: Any = property(_ANNOTATION.__get__, _annotate)


_VALUE: Any = Storage.__dict__["value"]
_set_value = _VALUE.__set__
"""Sets the value of a storage without reading the earlier one."""
raw_value = _VALUE.__get__
"""The value of a storage; of an `OwnedValue` without its array."""


def peek(storage: Storage) -> Value:
    """The value of a storage with its array, which a step goes on owning if it can."""
    with _OWNERSHIP:
        if not isinstance(storage, OwnedStorage):
            return storage.value
        owned = raw_value(storage)
        if not owned.owner.peekable:
            return storage.value
        owned.array = owned.owner.arrays[owned.index]
        return owned


class OwnedState:
    """The storages that a captured program reads and replaces in every run.

    Args:
        storages: each is there once.
        layouts: that the program takes, of each.
        positions: of each among the results.
    """

    def __init__(
        self, storages: Sequence[Storage], layouts: Sequence[int], positions: Sequence[int]
    ):
        """See the class; no array is owned yet."""
        self._storages, self._layouts, self._positions = storages, layouts, positions
        self._ids = frozenset(map(id, storages))
        self._owned = _OwnedArrays(len(storages))
        self._other_layout: set[int] | None = None  # results with another layout than the inputs
        self._select: Callable[[Sequence[Any]], list[Any]] = _selection(positions)
        weakref.finalize(self, _return_all, self._storages).atexit = False

    def are_owned(self) -> bool:
        """Whether no storage was read, written or annotated since the last run."""
        return not self._owned.moved_out

    def owns(self, storage: Storage) -> bool:
        """Whether a storage is one of these."""
        return id(storage) in self._ids

    def moved_out(self, layout: int) -> list[Storage]:
        """The storages that are not owned and that the program takes with a layout."""
        return [self._storages[n] for n in [*self._owned.moved_out] if self._layouts[n] == layout]

    def arrays(self, prepare: Callable[[Storage, int], Any]) -> list[Any]:
        """The arrays of all storages.

        Args:
            prepare: returns the array of a storage that cannot be owned, in a layout.
        """
        moved_out = self._owned.moved_out
        requested = [moved_out.popleft() for _ in range(len(moved_out))]
        missing = [index for index in requested if not self._acquire(index)]
        moved_out.extend(missing)
        unowned = {n: prepare(self._storages[n], self._layouts[n]) for n in missing}
        arrays = self._owned.arrays.copy()
        for index, array in unowned.items():
            arrays[index] = array
        return arrays

    def put(self, results: Sequence[Any], layouts: Sequence[int]) -> None:
        """Store the results of the program, which have these layouts."""
        if self._other_layout is None:
            pairs = zip(self._layouts, self._positions, strict=True)
            self._other_layout = {
                n for n, (layout, position) in enumerate(pairs) if layouts[position] != layout
            }
        with _OWNERSHIP:
            moved_out = self._owned.moved_out
            separate = self._other_layout.union(moved_out)  # missing, or read while the program ran
            moved_out.extend(self._other_layout.difference(moved_out))
            arrays = self._owned.arrays = self._select(results)
            for index in separate:
                arrays[index] = None
                position = self._positions[index]
                storage = self._storages[index]
                _set_class(storage, Storage)
                storage.write(Value(results[position], layouts[position]))

    def _acquire(self, index: int) -> bool:
        """Own an array if it has the layout that the program takes, and no other reference."""
        storage, layout = self._storages[index], self._layouts[index]
        with _OWNERSHIP:
            value = storage.value
            array = value.array
            ready = value.layout == layout and isinstance(array, jax.Array | UnevenArray)
            if not ready or value.taken is not None:
                return False
            owned = OwnedValue(layout, self._owned, index)
            owned.memory = value.memory
            reference = weakref.ref(value)
            _set_class(storage, OwnedStorage)
            _set_value(storage, owned)
            del value
            shared_value = reference()
            if shared_value is None:
                self._owned.arrays[index] = array
                return True
            _set_value(storage, shared_value)
            _set_class(storage, Storage)
            return False


def _return_all(storages: Sequence[Storage]) -> None:
    """Move all arrays out: the step is gone."""
    for storage in storages:
        _take(storage)


def _selection(indices: Sequence[int]) -> Callable[[Sequence[Any]], list[Any]]:
    """A function that returns a new list of the results at these indices."""
    first = min(indices, default=0)
    if [*indices] == [*range(first, first + len(indices))]:
        span = slice(first, first + len(indices))
        return lambda results: list(results[span])
    get = operator.itemgetter(*indices)
    return lambda results: list(get(results))


class LayerStack:
    """The state of one name in equal layers, as one array.

    Args:
        storages: of the layers, in order; none is in the stack yet.
        layout: the layout of each.

    Attributes:
        array: with a leading axis of layers; None before it is filled.
        layout: the layout of each layer's array.
        moved_out: indices of the layers that were read or written since they were stacked.
    """

    __slots__ = ("_slices", "_storages", "array", "layout", "moved_out")
    peekable = False
    """Reading a layer makes a slice."""

    def __init__(self, storages: Sequence[Storage], layout: int):
        """See the class."""
        self._storages = [weakref.ref(storage) for storage in storages]
        self._slices: dict[int, weakref.ref[Value]] = {}
        self.array: Any = None
        self.layout = layout
        self.moved_out = dict.fromkeys(range(len(storages)))

    def is_of(self, storages: Sequence[Storage], layout: int) -> bool:
        """Whether it is of these storages, in this order."""
        if len(storages) != len(self._storages) or layout != self.layout:
            return False
        return all(ref() is storage for ref, storage in zip(self._storages, storages, strict=True))

    def release(self, value: OwnedValue) -> None:
        """Copy a slice to its value."""
        value.array = self.slice(value.index)
        self.record_slice(value.index, value)
        metrics.count("repeat.slices")
        metrics.count("repeat.sliced_bytes", value.array.nbytes)

    def record_slice(self, index: int, value: Value) -> None:
        """Record that a layer has a slice of its own."""
        self.moved_out[index] = None
        self._slices[index] = weakref.ref(value)
        if len(self.moved_out) == len(self._storages):
            self.array = None

    def slice(self, index: int) -> jax.Array:
        """A copy of one layer's elements."""
        with _outside_of_traces():
            return _slicing(self.layout)(self.array, np.int32(index))

    def has_slice(self, index: int, value: Value) -> bool:
        """Whether a value is the slice that was copied: then the stack has its elements, too."""
        reference = self._slices.get(index)
        return self.array is not None and reference is not None and reference() is value

    def fill(self, arrays: dict[int, jax.Array]) -> None:
        """Write arrays of layers, by index; of all layers if there is no array yet."""
        metrics.count("repeat.stacks")
        metrics.count("repeat.stacked_bytes", sum(array.nbytes for array in arrays.values()))
        with _outside_of_traces():
            if self.array is None:
                slices = [arrays[index] for index in range(len(self._storages))]
                self.array = _stacking(self.layout)(*slices)
                return
            for index, array in arrays.items():
                self.array = _filling(self.layout)(self.array, array, np.int32(index))

    def acquire(self, index: int, storage: Storage, value: Value) -> None:
        """Own a layer again whose value is in the array, if the storage still has that value."""
        if raw_value(storage) is not value or isinstance(storage, OwnedStorage):
            return
        owned = OwnedValue(self.layout, self, index)
        owned.memory = storage.id
        _set_class(storage, OwnedStorage)
        _set_value(storage, owned)
        del self.moved_out[index]
        self._slices.pop(index, None)


class StackedState:
    """The binding of one stack: an input of a captured program, and a result.

    Args:
        storages: of the layers, in order.
        layout: of each layer's array.
        stacked_layout: of the stack.
    """

    def __init__(self, storages: Sequence[Storage], layout: int, stacked_layout: int):
        """See the class; the stack is found or made when it is first used."""
        self.storages = list(storages)
        self._layout, self._stacked_layout = layout, stacked_layout
        self._stack: LayerStack | None = None

    @property
    def is_owned(self) -> bool:
        """Whether no layer was read or written since the last run."""
        return self._stack is not None and not self._stack.moved_out

    def moved_out(self, layout: int) -> list[Storage]:
        """The storages that are not owned and that the program takes with a layout."""
        if layout != self._layout:
            return []
        indices = range(len(self.storages)) if self._stack is None else [*self._stack.moved_out]
        return [self.storages[index] for index in indices]

    def array(self, settle: Callable[[int, Value], None]) -> jax.Array:
        """The stack, including layers that were written since."""
        stack = self._stack
        if stack is None or stack.moved_out:
            stack = self._stack = self._gather(settle)
        return stack.array

    def put(self, array: jax.Array, layout: int) -> None:
        """Store the new stack, which has a layout."""
        stack: Any = self._stack
        with _OWNERSHIP:
            stack.array = array
            separate = [*stack.moved_out]  # read while the program ran
            if layout != self._stacked_layout:
                separate = [*range(len(self.storages))]
            for index in separate:
                storage = self.storages[index]
                value = Value(stack.slice(index), self._layout)
                _set_class(storage, Storage)
                storage.write(value)
                stack.record_slice(index, value)

    def _gather(self, settle: Callable[[int, Value], None]) -> LayerStack:
        stack = self._find()
        values = {index: visible(self.storages[index]) for index in [*stack.moved_out]}
        for value in values.values():
            settle(self._layout, value)
        with _OWNERSHIP:
            if stack.array is None and len(values) < len(self.storages):  # read meanwhile
                return self._gather(settle)
            unchanged = {
                index: value for index, value in values.items() if stack.has_slice(index, value)
            }
            if len(unchanged) < len(values):
                stack.fill({n: value.array for n, value in values.items() if n not in unchanged})
            for index, value in values.items():
                stack.acquire(index, self.storages[index], value)
        return stack

    def _find(self) -> LayerStack:
        """The stack of the storages, which may be another program's; or a new one."""
        with _OWNERSHIP:
            for storage in self.storages:
                owner = raw_value(storage).owner if isinstance(storage, OwnedStorage) else None
                if isinstance(owner, LayerStack) and owner.is_of(self.storages, self._layout):
                    return owner
        return self._stack or LayerStack(self.storages, self._layout)


@contextlib.contextmanager
def _outside_of_traces() -> Iterator[None]:
    """Context to compute on arrays in 64 bits, whatever trace or mesh the caller is in."""
    no_mesh = jax.sharding.use_abstract_mesh(_NO_MESH)
    with jax.ensure_compile_time_eval(), jax.enable_x64(True), no_mesh:
        yield


@cached(PROGRAMS)
def _slicing(layout: int) -> Any:
    return jax.jit(
        lambda stack, index: lax.dynamic_index_in_dim(stack, index, 0, keepdims=False),
        out_shardings=_sharding_of(layout),
    )


@cached(PROGRAMS)
def _stacking(layout: int) -> Any:
    return jax.jit(
        lambda *layers: jnp.stack(layers), out_shardings=_sharding_of(stacked_layout(layout))
    )


@cached(PROGRAMS)
def _filling(layout: int) -> Any:
    return jax.jit(
        lambda stack, layer, index: lax.dynamic_update_index_in_dim(stack, layer, index, 0),
        out_shardings=_sharding_of(stacked_layout(layout)),
        donate_argnums=0,
    )


def _sharding_of(index: int) -> Any:
    return None if index == sharding_ids.UNPLACED else sharding_ids.layout(index)


_NO_MESH = jax.sharding.AbstractMesh((), ())
