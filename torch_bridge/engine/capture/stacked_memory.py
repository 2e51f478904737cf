"""Memory of equal layers in one array, for programs that run the layers as a loop.

A step compiled with `repeat="auto"` takes the weights of one name in all layers as one array with
a leading axis of layers, and gives the new ones so. From one run to the next they stay stacked.
Each layer's tensor goes on being one by itself: its memory is `Resident`, and whoever looks at it
gets a slice, a copy that is counted. The stack stays as it is. Whoever writes to a layer's memory
takes it out, and the next run puts what was written in its place.

```
layers.0.weight --> Storage --> Kept(place 0) --\\
layers.1.weight --> Storage --> Kept(place 1) ---> MemoryStack.array (2, ..)
```

A stack belongs to the memory that is in it, and not to a program: a training step and an evaluation
that take the same layers share it. If all layers have been looked at each has its slice, and the
stack is dropped and made anew when it is needed, so memory is never held twice for long.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from isoshard.core.runtime import metrics
from isoshard.core.runtime.caches import PROGRAMS, cached
from isoshard.torch_bridge.engine.compiling.loop_layouts import stacked_layout
from isoshard.torch_bridge.engine.recording.memory_log import visible
from isoshard.torch_bridge.engine.values import layout_numbers
from isoshard.torch_bridge.engine.values.value import Storage, Value

from .resident import MOVING, Kept, Resident, held_value, hold, turn


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


@cached(PROGRAMS)
def _slicing(placed: int) -> Any:
    return jax.jit(
        lambda whole, place: lax.dynamic_index_in_dim(whole, place, 0, keepdims=False),
        out_shardings=_layout(placed),
    )


@cached(PROGRAMS)
def _stacking(placed: int) -> Any:
    return jax.jit(lambda *each: jnp.stack(each), out_shardings=_layout(stacked_layout(placed)))


@cached(PROGRAMS)
def _filling(placed: int) -> Any:
    return jax.jit(
        lambda whole, one, place: lax.dynamic_update_index_in_dim(whole, one, place, 0),
        out_shardings=_layout(stacked_layout(placed)),
        donate_argnums=0,
    )


def _layout(number: int) -> Any:
    return None if number == layout_numbers.UNPLACED else layout_numbers.layout(number)


_NO_MESH = jax.sharding.AbstractMesh((), ())
