"""The inputs of a captured program, gathered anew in each run.

Memory that stays with the step (`resident.py`) is at hand. Of the rest, what is so for nearly all,
that a value is placed as the program takes it and that nobody else can see it, is asked of all at
once, in C. Only inputs for which that leaves a doubt are looked at one by one.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.runtime import metrics
from isoshard.core.runtime.caches import cached
from isoshard.torch_bridge.engine.compiling import input_placement, program
from isoshard.torch_bridge.engine.compiling.padded_blocks import has_blocks, padded
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.memory_log import visible
from isoshard.torch_bridge.engine.recording.recorder import materialize
from isoshard.torch_bridge.engine.values import layout_numbers
from isoshard.torch_bridge.engine.values.value import Storage, Value

from .bindings import HostOperand, Scene
from .resident import Residents, held_value, present
from .stacked_memory import StackedMemory


class Gathering:
    """Where the inputs of a program are.

    Args:
        plan: of the program.
        sources: for each input, where it is found: a place, or a constant array.
        targets: which result is written to which place.
        several: numbers of the results that go to several places.
    """

    def __init__(
        self,
        plan: program.CompileRequest,
        sources: Sequence[Any],
        targets: Sequence[tuple[int, Any]],
        several: Container[int],
    ):
        """Tell constants, CPU tensors, and memory apart; and of memory what stays with the step."""
        self._plan = plan
        self._in_blocks = has_blocks(plan.placed)
        self._outside = [  # in order, to be inserted between the others
            (position, source)
            for position, source in enumerate(sources)
            if isinstance(source, jax.Array | UnevenArray | HostOperand | StackedMemory)
        ]
        self._stacks = [one for _, one in self._outside if isinstance(one, StackedMemory)]
        stacked = [storage for stack in self._stacks for storage in stack.storages]
        self._stacked = frozenset(map(id, stacked))
        outside = {position for position, _ in self._outside}
        written = {id(place): number for number, place in targets if number not in several}
        own = {
            id(source): position
            for position, source in enumerate(sources)
            if isinstance(source, Storage) and id(source) in written
        }
        self.stays = frozenset(own)
        inside = own.values()
        self.residents = Residents(
            [sources[position] for position in inside],
            [plan.placed[position] for position in inside],
            [written[key] for key in own],
        )
        others = [n for n in range(len(sources)) if n not in outside and n not in {*inside}]
        kept = [n for n in others if isinstance(sources[n], Storage)]
        found = [n for n in others if not isinstance(sources[n], Storage)]
        donated = set(plan.donated)
        self._storages = [sources[position] for position in kept]
        self._placed = [plan.placed[position] for position in kept]
        self._donated = [n for n, position in enumerate(kept) if position in donated]
        self._found = [(sources[n], plan.placed[n], n in donated) for n in found]
        self._free = [sources[n] for n in others if plan.placed[n] == layout_numbers.UNPLACED]
        self._gives = frozenset(id(sources[n]) for n in inside if n in donated)
        there = [*inside, *kept, *found]
        order = sorted(range(len(there)), key=there.__getitem__)
        self._order = None if order == [*range(len(there))] else operator.itemgetter(*order)

    def are_here(self) -> bool:
        """Whether nobody has looked at memory that stays, or annotated it, since the last run."""
        return self.residents.are_here() and all(stack.is_here for stack in self._stacks)

    def owns(self, storage: Storage) -> bool:
        """Whether it is some of this memory."""
        return self.residents.owns(storage) or id(storage) in self._stacked

    def fits(self, scene: Scene) -> bool:
        """Whether memory is laid out over a mesh only if the program takes it so.

        What is on a mesh can stay there, so a program for one device is no longer the one that
        another capture would make; the reverse is brought to the mesh (`_settle`).

        Args:
            scene: the tensors of the call.
        """
        there = [scene.storage(place) for place in self._free]
        if not self.residents.are_here():
            there += self.residents.away(layout_numbers.UNPLACED)
        for stack in self._stacks:
            if not stack.is_here:
                there += stack.away(layout_numbers.UNPLACED)
        fits = True
        recorded = []
        for storage in there:
            value = held_value(storage)
            if value.array is None and value.tape is not None:
                recorded.append(visible(storage))
            elif value.layout != layout_numbers.UNPLACED:
                fits = False
        if recorded:  # only once it is computed is its layout known
            materialize(recorded)
            fits = fits and all(value.layout == layout_numbers.UNPLACED for value in recorded)
        return fits

    def arrays(self, scene: Scene) -> Sequence[jax.Array]:
        """The arrays to call the program with.

        Args:
            scene: the tensors of the call.
        """
        arrays: Any = self.residents.arrays(self._own)
        if self._storages:
            arrays += self._others()
        for place, wanted, donated in self._found:
            arrays.append(self._ready(wanted, scene.storage(place), donated=donated))
        if self._order is not None:
            arrays = self._order(arrays)
        if self._outside:
            arrays = list(arrays)
        for position, source in self._outside:
            arrays.insert(position, self._from_outside(position, source))
        return padded(arrays) if self._in_blocks else arrays

    def _own(self, storage: Storage, layout: int) -> Any:
        return self._one(layout, storage, donated=id(storage) in self._gives)

    def _others(self) -> list[Any]:
        """The arrays of memory that the program only reads, and that is the same in each call."""
        arrays, doubts = self._at_once(self._storages)
        for number in sorted(doubts):
            wanted, donated = self._placed[number], doubts[number]
            arrays[number] = self._one(wanted, self._storages[number], donated=donated)
        return arrays

    def _ready(self, wanted: int, storage: Storage, *, donated: bool) -> Any:
        """The array of memory that is another in each call."""
        value = present(storage)
        array = value.array
        if value.layout == wanted and not donated and _is_placed(type(array)):
            return array
        del value, array  # not to be seen elsewhere
        return self._one(wanted, storage, donated=donated)

    def _at_once(self, storages: list[Storage]) -> tuple[list[Any], dict[int, bool]]:
        """The arrays of values, and which are to be looked at one by one.

        Returns:
            The arrays; and by number those in doubt, with whether the program overwrites them.
        """
        values = list(map(present, storages))
        arrays = list(map(_ARRAY, values))
        doubts: set[int] = set()
        if not all(map(_is_placed, set(map(type, arrays)))):
            ready = [isinstance(one, jax.Array | UnevenArray) for one in arrays]
            doubts |= {n for n, is_ready in enumerate(ready) if not is_ready}
        found = list(map(_LAYOUT, values))
        if found != self._placed:
            pairs = zip(found, self._placed, strict=True)
            doubts |= {n for n, (layout, wanted) in enumerate(pairs) if layout != wanted}
        certain = [n for n in self._donated if n not in doubts] if doubts else self._donated
        if certain:
            doubts |= _seen_elsewhere(certain, storages, values)
        if not doubts:
            return arrays, {}
        donated = set(self._donated)
        return arrays, {n: n in donated for n in doubts}

    def _one(self, wanted: int, storage: Storage, *, donated: bool) -> Any:
        """An input of the program: a copy, if it is donated and somebody else can see it.

        Args:
            wanted: the layout that the program takes.
            storage: where its value is.
            donated: whether the program overwrites its memory.
        """
        self._settle(wanted, visible(storage))
        if not donated or storage.is_sole_holder():
            return visible(storage).array
        array: Any = visible(storage).array
        (buffer,) = jax.tree.leaves(array)
        metrics.count("copies")
        metrics.count("copied_bytes", buffer.nbytes)
        with jax.enable_x64(True):
            return jax.tree.map(jnp.copy, array)

    def _from_outside(self, position: int, source: Any) -> Any:
        """An input of the program that no tensor's memory is by itself."""
        if isinstance(source, StackedMemory):
            return source.array(self._settle)
        return self._from_host(position, source) if isinstance(source, HostOperand) else source

    def _from_host(self, position: int, source: HostOperand) -> Any:
        """An input of the program that a CPU tensor holds."""
        value = lazy_tensor.host_value(source.read())
        value.layout = self._plan.placed[position]
        input_placement.place([value])
        return value.array

    def _settle(self, wanted: int, value: Value) -> None:
        """Compute a value, and bring it to the layout that the program takes."""
        if value.array is None:
            materialize([value])
        if value.layout != wanted or not isinstance(value.array, jax.Array | UnevenArray):
            value.layout = value.layout if wanted == layout_numbers.UNPLACED else wanted
            input_placement.place([value])


def _seen_elsewhere(
    numbers: Sequence[int], storages: Sequence[Storage], values: list[Value]
) -> set[int]:
    """Which of these storages are not the only ones to hold their values.

    Each gives its value up for another one with the same array, as in `Storage.is_sole_holder`: a
    value that dies was seen by nobody else.

    Args:
        numbers: of the storages.
        storages: all of them.
        values: what they hold; emptied.
    """
    found = {n for n in numbers if values[n].taken is not None}
    last: list[tuple[int, Any]] = []
    for number in numbers:
        if number not in found:
            value = values[number]
            last.append((number, weakref.ref(value)))
            new = Value(value.array, value.layout)
            new.memory = value.memory
            storages[number].value = new
    value = None
    values.clear()
    for number, ask in last:
        held = ask()
        if held is not None:
            storages[number].value = held
            found.add(number)
    return found


@cached(4096)
def _is_placed(kind: type) -> bool:
    """Whether such arrays are on devices."""
    return issubclass(kind, jax.Array | UnevenArray)


_ARRAY = operator.attrgetter("array")
_LAYOUT = operator.attrgetter("layout")
