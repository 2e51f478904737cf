"""Memory that stays with a captured step from one run to the next.

A step over 1,000 parameters would ask before each run where their arrays are and whether somebody
else holds them, and put 1,000 results where they belong. But between two runs nearly all of them
are looked at by nobody. So what a step wrote stays with it: the memory becomes `Resident`, and its
value is reached through a property. Whoever reads or replaces the value takes the memory away from
the step, which asks for it again in its next run.
"""

from __future__ import annotations

import collections
import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from isoshard.core.layout.uneven import UnevenArray
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
