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

from isoshard.core.uneven import UnevenArray

from ..value import Storage, Value

_MOVING = threading.RLock()
"""Held while memory goes to a step or away from it, never while a program runs."""


class Kept(Value):
    """The value of memory that a step keeps: nobody has seen it, so the step may replace its array.

    Attributes:
        place: of the memory in the step.
        away: the places of memory that the step has to ask for again.
    """

    __slots__ = ("away", "place")

    def __init__(self, array: Any, layout: int, place: int, away: collections.deque[int]):
        """Hold `array` for a step."""
        super().__init__(array, layout)
        self.place, self.away = place, away


def _turn(storage: Any, kind: type[Storage]) -> None:
    """Let memory be of another class with the same fields."""
    storage.__class__ = kind


def _look(storage: Storage) -> Value:
    with _MOVING:
        if isinstance(storage, Resident):
            kept = HELD(storage)
            _turn(storage, Storage)
            kept.away.append(kept.place)
        return HELD(storage)


def _replace(storage: Storage, value: Value) -> None:
    with _MOVING:
        _look(storage)
        storage.value = value


class Resident(Storage):
    """Memory that a captured step wrote and that nobody has looked at since."""

    __slots__ = ()
    value: Any = property(_look, _replace)


_FIELD: Any = Storage.__dict__["value"]
HELD = _FIELD.__get__
"""The value of memory; a step that keeps it goes on keeping it."""


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
        self._away = collections.deque(range(len(storages)))
        self._running: list[Value] = []
        self._moved: set[int] | None = None  # laid out by the program as it does not take them

    def arrays(self, otherwise: Callable[[Storage, int], Any]) -> list[Any]:
        """What the memory holds.

        Args:
            otherwise: gives the array of memory that cannot be kept, and how the program takes it.
        """
        self._running = []  # of a run that failed
        asked = [self._away.popleft() for _ in range(len(self._away))]
        missing = [place for place in asked if not self._keep(place)]
        self._away.extend(missing)
        found = {n: otherwise(self._storages[n], self._placed[n]) for n in missing}
        self._running = list(map(HELD, self._storages))  # now: it holds them, too
        arrays = list(map(_ARRAY, self._running))
        for place, array in found.items():
            arrays[place] = array
        return arrays

    def put(self, results: Sequence[Any], layouts: Sequence[int]) -> None:
        """Let the memory hold what the program left.

        Args:
            results: of the program.
            layouts: of each.
        """
        values, self._running = self._running, []
        if self._moved is None:
            pairs = zip(self._placed, self._numbers, strict=True)
            self._moved = {n for n, (taken, number) in enumerate(pairs) if layouts[number] != taken}
        apart = self._moved.union(self._away)  # missing, or looked at while the program ran
        self._away.extend(self._moved.difference(self._away))
        for place in apart:
            number = self._numbers[place]
            storage = self._storages[place]
            _turn(storage, Storage)
            storage.write(Value(results[number], layouts[number]))
            values[place] = Value()
        for value, number in zip(values, self._numbers, strict=True):
            value.array = results[number]

    def _keep(self, place: int) -> bool:
        """Take memory over, if its array is as the program takes it, and nobody else sees it."""
        storage, layout = self._storages[place], self._placed[place]
        with _MOVING:
            value = storage.value
            array = value.array
            ready = value.layout == layout and isinstance(array, jax.Array | UnevenArray)
            if not ready or value.taken is not None:
                return False
            kept = Kept(array, layout, place, self._away)
            kept.memory = value.memory
            last = weakref.ref(value)
            _turn(storage, Resident)
            _FIELD.__set__(storage, kept)
            del value
            held = last()
            if held is None:
                return True
            _FIELD.__set__(storage, held)
            _turn(storage, Storage)
            return False


_ARRAY = operator.attrgetter("array")
