"""The inputs of a captured program, gathered anew in each run.

A program over 1,000 tensors takes 1,000 arrays, and may overwrite most of them. What is so for
nearly all, that a value is placed as the program takes it and that nobody else can see it, is asked
of all at once, in C. Only inputs for which that leaves a doubt are looked at one by one.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from isoshard.core import metrics
from isoshard.core.uneven import UnevenArray

from .. import base, layouts, placement, program
from ..blocks import padded
from ..log import visible
from ..recorder import materialize
from ..value import Storage, Value
from .places import Operand, Scene


class Gathering:
    """Where the inputs of a program are.

    Args:
        plan: of the program.
        sources: for each input, where it is found: a place, or a constant array.
    """

    def __init__(self, plan: program.Plan, sources: Sequence[Any]):
        """Tell constants, CPU tensors, and memory apart."""
        self._plan = plan
        self._outside = [  # in order, to be inserted between the others
            (position, source)
            for position, source in enumerate(sources)
            if isinstance(source, jax.Array | UnevenArray | Operand)
        ]
        outside = {position for position, _ in self._outside}
        self._positions = [n for n in range(len(sources)) if n not in outside]
        self._storages = [sources[position] for position in self._positions]
        self._placed = [plan.placed[position] for position in self._positions]
        self._found = [n for n, one in enumerate(self._storages) if not isinstance(one, Storage)]
        donated = set(plan.donated)
        self._donated = [n for n, position in enumerate(self._positions) if position in donated]
        self._pick = operator.itemgetter(*self._donated, len(self._positions))

    def arrays(self, scene: Scene) -> list[jax.Array]:
        """The arrays to call the program with.

        Args:
            scene: the tensors of the call.
        """
        storages = self._storages
        if self._found:
            storages = list(storages)
            for number in self._found:
                storages[number] = scene.storage(storages[number])
        arrays, doubts = self._at_once(storages)
        for number in sorted(doubts):
            arrays[number] = self._one(number, storages[number], donated=doubts[number])
        for position, source in self._outside:
            array = self._from_host(position, source) if isinstance(source, Operand) else source
            arrays.insert(position, array)
        return padded(arrays) if UnevenArray in set(map(type, arrays)) else arrays

    def _at_once(self, storages: list[Storage]) -> tuple[list[Any], dict[int, bool]]:
        """The arrays of values, and which are to be looked at one by one.

        A value that a storage alone refers to counts one reference fewer than any other. How many
        that are, a value says that is made for it.

        Returns:
            The arrays; and by number those in doubt, with whether the program overwrites them.
        """
        holders = [*storages, _Holder(Value())]
        values = list(map(_VALUE, holders))
        arrays = list(map(_ARRAY, values))
        del arrays[-1]
        doubts: dict[int, bool] = {}
        if any(not issubclass(kind, jax.Array | UnevenArray) for kind in set(map(type, arrays))):
            ready = [isinstance(one, jax.Array | UnevenArray) for one in arrays]
            doubts |= {n: False for n, is_ready in enumerate(ready) if not is_ready}
        found = list(map(_LAYOUT, values))
        del found[-1]
        if found != self._placed:
            pairs = zip(found, self._placed, strict=True)
            doubts |= {n: False for n, (layout, wanted) in enumerate(pairs) if layout != wanted}
        if self._donated:
            *counts, alone = self._pick(list(map(sys.getrefcount, values)))
            *taken, _ = self._pick(list(map(_TAKEN, values)))
            *weak, _ = self._pick(list(map(weakref.getweakrefcount, values)))
            total = len(self._donated)
            if not counts.count(alone) == taken.count(None) == weak.count(0) == total:
                facts = zip(self._donated, counts, taken, weak, strict=True)
                doubts |= {n: True for n, *fact in facts if fact != [alone, None, 0]}
            if doubts:
                donated = set(self._donated)
                doubts = {n: n in donated for n in doubts}
        return arrays, doubts

    def _one(self, number: int, storage: Storage, *, donated: bool) -> Any:
        """An input of the program: a copy, if it is donated and somebody else can see it.

        Args:
            number: of the input among those in memory.
            storage: where its value is.
            donated: whether the program overwrites its memory.
        """
        self._settle(self._placed[number], visible(storage))
        if not donated or storage.is_sole_holder():
            return visible(storage).array
        array: Any = visible(storage).array
        (buffer,) = jax.tree.leaves(array)
        metrics.count("copies")
        metrics.count("copied_bytes", buffer.nbytes)
        return jax.tree.map(jnp.copy, array)

    def _from_host(self, position: int, source: Operand) -> Any:
        """An input of the program that a CPU tensor holds."""
        value = base.host_value(source.read())
        value.layout = self._plan.placed[position]
        placement.place([value])
        return value.array

    def _settle(self, wanted: int, value: Value) -> None:
        """Compute a value, and bring it to the layout that the program takes."""
        if value.array is None:
            materialize([value])
        if value.layout != wanted or not isinstance(value.array, jax.Array | UnevenArray):
            value.layout = value.layout if wanted == layouts.UNPLACED else wanted
            placement.place([value])


class _Holder:
    """Holds a value as a storage does."""

    __slots__ = ("value",)

    def __init__(self, value: Value):
        self.value = value


_VALUE = operator.attrgetter("value")
_ARRAY = operator.attrgetter("array")
_LAYOUT = operator.attrgetter("layout")
_TAKEN = operator.attrgetter("taken")
