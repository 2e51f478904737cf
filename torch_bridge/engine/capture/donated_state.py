"""State that a captured step owns between its runs and donates to the next one.

A step over 1,000 parameters would have to ask before each run where their arrays are and whether
they have other references, and to store 1,000 results. But between two runs hardly any of them is
read. So the step owns what it wrote: the storage becomes a `Resident`, whose value is a property.
Reading or replacing the value moves the array out of the step, which takes it back in its next run.

A step compiled with `repeat="auto"` takes the weights of one name in all layers as one array with a
leading axis of layers, and returns the new ones so. Between runs they remain stacked, and each
layer's storage is a `Resident`:

```
layers.0.weight --> Storage --> Kept(place 0) --\\
layers.1.weight --> Storage --> Kept(place 1) ---> MemoryStack.array (2, ..)
```

Reading a layer's value gives a slice, a counted copy, and the stack remains valid. Writing to a
layer takes it out, and the next run puts it in again. A stack belongs to the storages in it, not to
a program: a training step and an evaluation of the same layers share it. When all layers have been
read it is dropped, and made again when it is needed, so that state is not stored twice for long.
"""

from __future__ import annotations

import collections
import contextlib
import functools
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
from isoshard.torch_bridge.engine.compiling.loop_layouts import stacked_layout
from isoshard.torch_bridge.engine.recording.memory_log import visible
from isoshard.torch_bridge.engine.values import layout_numbers
from isoshard.torch_bridge.engine.values.value import Storage, Value

MOVING = threading.RLock()
"""Held while memory goes to a step or away from it, never while a program runs."""


class Kept(Value):
    """The value of memory that a step keeps: nobody has seen it, so the step may replace its array.

    It has its array once somebody looks; until then the step has it.

    Attributes:
        shelf: the arrays of the step; or a stack of equal memory, see `stacked_memory`.
        place: of this one among them.
    """

    __slots__ = ("place", "shelf")

    def __init__(self, layout: int, shelf: Any, place: int):
        """What a step holds at a place."""
        super().__init__(None, layout)
        self.shelf, self.place = shelf, place


class _Shelf:
    """The arrays that a step keeps. It refers to no memory, so there is no reference cycle.

    Attributes:
        arrays: of each memory that is not away.
        away: the places of memory that the step has to ask for again.
    """

    __slots__ = ("arrays", "away")
    lends = True
    """What it keeps can be seen while it stays."""

    def __init__(self, size: int):
        self.arrays: list[Any] = [None] * size
        self.away = collections.deque(range(size))

    def give(self, value: Kept) -> None:
        """Let a value have its array."""
        value.array, self.arrays[value.place] = self.arrays[value.place], None
        self.away.append(value.place)


def turn(storage: Any, kind: type[Storage]) -> None:
    """Let memory be of another class with the same fields."""
    storage.__class__ = kind


def _look(storage: Storage) -> Value:
    with MOVING:
        value = held_value(storage)
        if isinstance(storage, Resident):
            value.shelf.give(value)
            value.shelf = None
            turn(storage, Storage)
        return value


def _replace(storage: Storage, value: Value) -> None:
    with MOVING:
        _look(storage)
        storage.value = value


def _annotate(storage: Storage, annotation: Any) -> None:
    with MOVING:
        _look(storage)
        storage.annotation = annotation


_ANNOTATION: Any = Storage.__dict__["annotation"]


class Resident(Storage):
    """Memory that a captured step wrote and that nobody has looked at since."""

    __slots__ = ()
    value: Any = property(_look, _replace)
    annotation: Any = property(_ANNOTATION.__get__, _annotate)


_FIELD: Any = Storage.__dict__["value"]
hold = _FIELD.__set__
"""Lets memory have a value, without looking at the one it has."""
held_value = _FIELD.__get__
"""The value of memory; if it is `Kept`, without its array."""


def present(storage: Storage) -> Value:
    """The value of memory, with its array; a step that keeps it goes on keeping it."""
    with MOVING:
        if not isinstance(storage, Resident):
            return storage.value
        kept = held_value(storage)
        if not kept.shelf.lends:
            return storage.value
        kept.array = kept.shelf.arrays[kept.place]
        return kept


class Residents:
    """The memory that a captured program reads and replaces in every run.

    Args:
        storages: each is there once.
        placed: how the program takes each.
        numbers: which result each becomes.
    """

    def __init__(self, storages: Sequence[Storage], placed: Sequence[int], numbers: Sequence[int]):
        """See the class; all memory is to be asked for."""
        self._storages, self._placed, self._numbers = storages, placed, numbers
        self._ids = frozenset(map(id, storages))
        self._shelf = _Shelf(len(storages))
        self._moved: set[int] | None = None  # laid out by the program as it does not take them
        self._select: Callable[[Sequence[Any]], list[Any]] = _selection(numbers)
        weakref.finalize(self, _give_back, self._storages).atexit = False

    def are_here(self) -> bool:
        """Whether nobody has looked at any memory, or annotated it, since the last run."""
        return not self._shelf.away

    def owns(self, storage: Storage) -> bool:
        """Whether it is some of this memory."""
        return id(storage) in self._ids

    def away(self, placed: int) -> list[Storage]:
        """The memory that is to be asked for again and that the program takes with a layout."""
        return [self._storages[n] for n in [*self._shelf.away] if self._placed[n] == placed]

    def arrays(self, otherwise: Callable[[Storage, int], Any]) -> list[Any]:
        """What the memory holds.

        Args:
            otherwise: gives the array of memory that cannot be kept, and how the program takes it.
        """
        away = self._shelf.away
        asked = [away.popleft() for _ in range(len(away))]
        missing = [place for place in asked if not self._keep(place)]
        away.extend(missing)
        found = {n: otherwise(self._storages[n], self._placed[n]) for n in missing}
        arrays = self._shelf.arrays.copy()
        for place, array in found.items():
            arrays[place] = array
        return arrays

    def put(self, results: Sequence[Any], layouts: Sequence[int]) -> None:
        """Let the memory hold what the program left.

        Args:
            results: of the program.
            layouts: of each.
        """
        if self._moved is None:
            pairs = zip(self._placed, self._numbers, strict=True)
            self._moved = {n for n, (taken, number) in enumerate(pairs) if layouts[number] != taken}
        with MOVING:
            away = self._shelf.away
            apart = self._moved.union(away)  # missing, or looked at while the program ran
            away.extend(self._moved.difference(away))
            arrays = self._shelf.arrays = self._select(results)
            for place in apart:
                arrays[place] = None
                number = self._numbers[place]
                storage = self._storages[place]
                turn(storage, Storage)
                storage.write(Value(results[number], layouts[number]))

    def _keep(self, place: int) -> bool:
        """Take memory over, if its array is as the program takes it, and nobody else sees it."""
        storage, layout = self._storages[place], self._placed[place]
        with MOVING:
            value = storage.value
            array = value.array
            ready = value.layout == layout and isinstance(array, jax.Array | UnevenArray)
            if not ready or value.taken is not None:
                return False
            kept = Kept(layout, self._shelf, place)
            kept.memory = value.memory
            last = weakref.ref(value)
            turn(storage, Resident)
            hold(storage, kept)
            del value
            held = last()
            if held is None:
                self._shelf.arrays[place] = array
                return True
            hold(storage, held)
            turn(storage, Storage)
            return False


def _give_back(storages: Sequence[Storage]) -> None:
    """Without the step each memory has its own array."""
    for storage in storages:
        _look(storage)


def _selection(numbers: Sequence[int]) -> Callable[[Sequence[Any]], list[Any]]:
    """A function that gives the results of these numbers, in a list of its own."""
    first = min(numbers, default=0)
    if [*numbers] == [*range(first, first + len(numbers))]:
        where = slice(first, first + len(numbers))
        return lambda results: list(results[where])
    get = operator.itemgetter(*numbers)
    return lambda results: list(get(results))


class MemoryStack:
    """Equal memory as one array.

    Args:
        storages: of the layers, in order; none of it is in the stack yet.
        placed: the layout of each.

    Attributes:
        array: with a leading axis of layers; None if it is to be made.
        placed: the layout of each layer's memory.
        away: the places of memory that was looked at or written since it was put here.
    """

    __slots__ = ("_looked", "_members", "array", "away", "placed")
    lends = False
    """Whoever sees a value in it takes that away: it has no array of its own before."""

    def __init__(self, storages: Sequence[Storage], placed: int):
        """See the class."""
        self._members = [weakref.ref(storage) for storage in storages]
        self._looked: dict[int, weakref.ref[Value]] = {}
        self.array: Any = None
        self.placed = placed
        self.away = dict.fromkeys(range(len(storages)))

    def is_of(self, storages: Sequence[Storage], placed: int) -> bool:
        """Whether it is of this memory, in this order."""
        if len(storages) != len(self._members) or placed != self.placed:
            return False
        return all(ref() is one for ref, one in zip(self._members, storages, strict=True))

    def give(self, value: Kept) -> None:
        """Let a value have its slice."""
        value.array = self.slice(value.place)
        self.leave(value.place, value)
        metrics.count("repeat.slices")
        metrics.count("repeat.sliced_bytes", value.array.nbytes)

    def leave(self, place: int, value: Value) -> None:
        """Memory has a slice of its own for now."""
        self.away[place] = None
        self._looked[place] = weakref.ref(value)
        if len(self.away) == len(self._members):
            self.array = None

    def slice(self, place: int) -> jax.Array:
        """A copy of one layer's elements."""
        with _aside():
            return _slicing(self.placed)(self.array, np.int32(place))

    def has(self, place: int, value: Value) -> bool:
        """Whether this is the value that was given for a place: then the stack has it as well."""
        looked = self._looked.get(place)
        return self.array is not None and looked is not None and looked() is value

    def fill(self, arrays: dict[int, jax.Array]) -> None:
        """Put arrays in places.

        Args:
            arrays: by place; of all places, if there is no array yet.
        """
        metrics.count("repeat.stacks")
        metrics.count("repeat.stacked_bytes", sum(array.nbytes for array in arrays.values()))
        with _aside():
            if self.array is None:
                every = [arrays[place] for place in range(len(self._members))]
                self.array = _stacking(self.placed)(*every)
                return
            for place, array in arrays.items():
                self.array = _filling(self.placed)(self.array, array, np.int32(place))

    def take(self, place: int, storage: Storage, value: Value) -> None:
        """Memory whose value is in the array goes back into the stack, if that is its value yet."""
        if held_value(storage) is not value or isinstance(storage, Resident):
            return
        kept = Kept(self.placed, self, place)
        kept.memory = storage.number
        turn(storage, Resident)
        hold(storage, kept)
        del self.away[place]
        self._looked.pop(place, None)


class StackedMemory:
    """Where a captured program finds one stack, and stores it.

    Args:
        storages: of the layers, in order.
        placed: how the program takes each of them, were it alone.
        whole: the layout of the stack.
    """

    def __init__(self, storages: Sequence[Storage], placed: int, whole: int):
        """See the class; the stack is made, or found, when it is first asked for."""
        self._storages = list(storages)
        self._placed, self._whole = placed, whole
        self._stack: MemoryStack | None = None

    @property
    def storages(self) -> list[Storage]:
        """The memory of the layers."""
        return self._storages

    @property
    def is_here(self) -> bool:
        """Whether nobody has looked at any layer's memory since the last run."""
        return self._stack is not None and not self._stack.away

    def away(self, placed: int) -> list[Storage]:
        """The memory that is to be asked for again and that the program takes with a layout."""
        if placed != self._placed:
            return []
        places = range(len(self._storages)) if self._stack is None else [*self._stack.away]
        return [self._storages[place] for place in places]

    def array(self, settled: Callable[[int, Value], None]) -> jax.Array:
        """The stack, with what has been written to the memory since.

        Args:
            settled: computes a value, and brings it to a layout.
        """
        stack = self._stack
        if stack is None or stack.away:
            stack = self._stack = self._gathered(settled)
        return stack.array

    def put(self, array: jax.Array, layout: int) -> None:
        """Let the memory hold what the program left.

        Args:
            array: the new stack.
            layout: of it.
        """
        stack: Any = self._stack
        with MOVING:
            stack.array = array
            apart = [*stack.away]  # looked at while the program ran
            if layout != self._whole:
                apart = [*range(len(self._storages))]
            for place in apart:
                storage = self._storages[place]
                value = Value(stack.slice(place), self._placed)
                turn(storage, Storage)
                storage.write(value)
                stack.leave(place, value)

    def _gathered(self, settled: Callable[[int, Value], None]) -> MemoryStack:
        stack = self._found()
        values = {place: visible(self._storages[place]) for place in [*stack.away]}
        for value in values.values():
            settled(self._placed, value)
        with MOVING:
            if stack.array is None and len(values) < len(self._storages):  # looked at meanwhile
                return self._gathered(settled)
            there = {place: value for place, value in values.items() if stack.has(place, value)}
            if len(there) < len(values):
                stack.fill({n: one.array for n, one in values.items() if n not in there})
            for place, value in values.items():
                stack.take(place, self._storages[place], value)
        return stack

    def _found(self) -> MemoryStack:
        """The stack that the memory is in, also of another program; or a new one."""
        with MOVING:
            for storage in self._storages:
                shelf = held_value(storage).shelf if isinstance(storage, Resident) else None
                if isinstance(shelf, MemoryStack) and shelf.is_of(self._storages, self._placed):
                    return shelf
        return self._stack or MemoryStack(self._storages, self._placed)


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Computes on arrays, also while JAX traces, in 64 bits, whatever mesh the caller has set."""
    alone = jax.sharding.use_abstract_mesh(_NO_MESH)
    with jax.ensure_compile_time_eval(), jax.enable_x64(True), alone:
        yield


@functools.cache
def _slicing(placed: int) -> Any:
    return jax.jit(
        lambda whole, place: lax.dynamic_index_in_dim(whole, place, 0, keepdims=False),
        out_shardings=_layout(placed),
    )


@functools.cache
def _stacking(placed: int) -> Any:
    return jax.jit(lambda *each: jnp.stack(each), out_shardings=_layout(stacked_layout(placed)))


@functools.cache
def _filling(placed: int) -> Any:
    return jax.jit(
        lambda whole, one, place: lax.dynamic_update_index_in_dim(whole, one, place, 0),
        out_shardings=_layout(stacked_layout(placed)),
        donate_argnums=0,
    )


def _layout(number: int) -> Any:
    return None if number == layout_numbers.UNPLACED else layout_numbers.layout(number)


_NO_MESH = jax.sharding.AbstractMesh((), ())
