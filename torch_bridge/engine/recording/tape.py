"""The tape: operations waiting to be compiled together.

Every torch operation on the `jax` device becomes one entry, `(recipe number, input slots)`. Recipes
and inputs are interned to integers, so the entries of a training step are the key under which its
compiled program is found again.

A tape belongs to one thread or asyncio task, which alone records on it. Any thread may execute it:
a value recorded on another one's tape is computed first (`materialize`).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from isoshard.core.layout.virtual_devices import Device
from isoshard.torch_bridge.engine.values import sharding_ids as layouts
from isoshard.torch_bridge.engine.values.unify_meshes import differently_numbered, unified
from isoshard.torch_bridge.engine.values.value import Taken, Value

from . import random_state, recorded_programs
from .immediate import Immediate, immediately, is_tracing, takes_constants
from .origins import Origin, OriginLog, origin
from .recipes import RECIPES, Recipe
from .recorded_constants import constant_of
from .recorded_programs import EarlierProgram
from .recorder import Recorder, execute, materialize, recorder, replace, wire_new

__all__ = [
    "RECIPES",
    "Immediate",
    "Recipe",
    "Recorder",
    "Tape",
    "immediately",
    "is_tracing",
    "materialize",
    "recorder",
    "replace",
    "takes_constants",
]

LIMIT = 100_000
"""Entries after which a tape is executed even if no value was read."""


class Tape(Recorder):
    """Entries recorded by one thread or task since the last `sync`.

    Results are referenced weakly: one without other references need not be computed. Of an input
    the array is referenced, the value weakly: one without other references may be overwritten.

    Attributes:
        slots: its values, by slot: inputs, and weakly results.
        program: the compile key so far: for an input, its interned shape and dtype; for an
            operation, its recipe's number and input slots.
        leaves: slots of the inputs.
        marks: the layouts that its constraints request.
        scalars: the lifted floats, in order of use.
        words: the random keys taken.
        recipes: its recipes by id.
        done: it was executed (perhaps by another thread), and takes nothing more.
        failed: it could not be executed as a whole.
        error: what the first of its operations that failed has raised; see `failed_ops`.
        devices: the devices of the mesh that its inputs are on, in order; empty while none is.
        lock: locked while an entry is added, and while it is decided what is computed.
        expected: the entries of the program that it seems to repeat; while there are such, an
            operation that is among them is not looked at.
        expected_count: how many; -1 if every operation is looked at.
        repeated: that program; None once an operation differs.
        printed: what to print once it is executed; see `printing.Printed`.
        noted: where its operations come from; None of one that repeats a program throughout.
    """

    __slots__ = (
        "_index_of",
        "_views",
        "devices",
        "done",
        "error",
        "expected",
        "expected_count",
        "failed",
        "leaves",
        "lock",
        "marks",
        "noted",
        "printed",
        "program",
        "recipes",
        "repeated",
        "scalars",
        "slots",
        "words",
    )

    def __init__(self):
        """An empty tape."""
        super().__init__()
        self.slots: list[Taken | weakref.ref[Value]] = []
        self.program: list[Any] = []
        self.recipes: set[Recipe] = set()
        self.leaves: list[int] = []
        self.marks: set[int] = set()
        self.scalars: list[Any] = []
        self.words: list[random_state.Word] = []
        self.done = False
        self.failed = False
        self.error: Exception | None = None
        self.devices: tuple[Device, ...] = ()
        self.lock = threading.RLock()
        self.repeated = recorded_programs.newest()
        self.noted: OriginLog | None = OriginLog()
        self.printed: list[Any] = []
        self.expected: tuple[Any, ...] = ()
        self.expected_count = -1
        self._index_of: dict[Taken | None, int] = {}
        self._views: dict[tuple[int, Any], tuple[int, int]] = {}

    def record(
        self, recipe: Recipe, inputs: Sequence[Value], scalars: Sequence[Any] = ()
    ) -> list[Value]:
        """Add an operation and return its (recorded) results."""
        index_of, slots = self._index_of, self.slots
        entry = [recipe.id]
        self.lock.acquire()  # half the price of `with`, and this is the hottest line
        try:
            ended = self.done or len(self.program) > LIMIT
            for value in () if ended else inputs:
                if value.tape is self:
                    entry.append(value.slot)
                    continue
                slot = index_of.get(value.taken)
                if slot is None:
                    if value.array is None or (value.layout >= 0 and not self.joins(value.layout)):
                        break
                    slot = self._take(value)
                entry.append(slot)
            else:
                if not ended:
                    results = []
                    for _ in range(recipe.count):
                        value = Value(None, _UNPLACED, self, len(slots))
                        results.append(value)
                        slots.append(_weakly(value))
                    program = self.program
                    index, operation = len(program), tuple(entry)
                    program.append(operation)
                    if index >= self.expected_count or self.expected[index] != operation:
                        self._note(index, operation)
                    self.recipes.add(recipe)
                    if scalars:
                        self.scalars += scalars
                    if recipe.random:
                        self.words.append(random_state.take(self))
                    return results
        finally:
            self.lock.release()
        # Not under the lock: another thread may hold one of its own while it waits for this tape.
        if ended:
            return self._successor().record(recipe, inputs, scalars)
        if value.array is None:
            settled = [input_ if input_.tape is self else _settled(input_) for input_ in inputs]
            return recorder().record(recipe, settled, scalars)
        return self._on_another_mesh(recipe, inputs, scalars)

    def _note(self, index: int, entry: tuple[int, ...]) -> None:
        """Note where an operation comes from: as in an earlier program, or by the stack."""
        noted, earlier = self.noted, self.repeated
        repeats = earlier is not None and index < len(earlier.entries)
        if not repeats or (earlier is not None and earlier.entries[index] != entry):
            before = earlier
            earlier = None if earlier is None else recorded_programs.beginning_with(self.program)
            self.repeated = earlier
            if noted is None and earlier is not None:
                self._expect(earlier)
                return
            if noted is None:
                noted = self.noted = OriginLog()
                noted.extend(() if before is None else before.origins[:index])
                self.expected, self.expected_count = (), -1
        if noted is not None:
            noted.pad(index)
            noted.note(origin(noted) if earlier is None else earlier.origins[index])

    def _expect(self, earlier: EarlierProgram) -> None:
        """Let operations that are those of an earlier program pass."""
        self.repeated, self.expected = earlier, earlier.entries
        self.expected_count = len(earlier.entries)

    def origins(self) -> Sequence[Origin | None]:
        """Where each of its entries comes from; None for inputs."""
        if self.noted is None:
            return () if self.repeated is None else self.repeated.origins[: len(self.program)]
        self.noted.pad(len(self.program))
        return self.noted.origins

    def remember(self) -> None:
        """Keep the origins, for tapes that repeat this one."""
        if self.repeated is None and self.program and not self.plans:
            recorded_programs.remember(EarlierProgram(tuple(self.program), tuple(self.origins())))

    def forget(self) -> None:
        """Let go of the inputs, after it was executed or if it never will be."""
        slots = self.slots
        for slot in self.leaves:
            if slot < len(slots):
                taken = slots[slot]
                if isinstance(taken, Taken):
                    taken.let_go(self)
        slots.clear()
        self._index_of.clear()

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        """Nothing recorded here will be read any more."""
        if not ends():  # at the end of Python, this module's names are gone
            self.forget()

    def value(self, slot: int) -> Value | None:
        """The value of a slot; None if it is dead."""
        current = self.slots[slot]
        return current.value() if isinstance(current, Taken) else current()

    def constant_elements(self, value: Value) -> Any:
        """The elements of a recorded value that depends on no input; else None."""
        if value.tape is not self or self.capture is not None or self.plans or self.done:
            return None
        return constant_of(self.program, len(self.slots), value.slot)

    def inputs(self) -> list[Value | Taken]:
        """What it takes from outside, in order."""
        inputs = [self.slots[slot] for slot in self.leaves]
        return [taken.value_or_self() for taken in inputs if isinstance(taken, Taken)]

    def layouts(self) -> set[int]:
        """The layouts of its inputs, and those that its constraints request."""
        return {input_.layout for input_ in self.inputs()} | self.marks

    def view(self, base: Value, chain: Any) -> Value | None:
        """The value of a view that was read before."""
        base_slot = self._slot(base)
        if base_slot is None:
            return None
        view = self._views.get((base_slot, chain))
        if view is None:
            return None
        with self.lock:
            return None if self.done else self._revived(*view)

    def keep_view(self, base: Value, chain: Any, view: Value) -> None:
        """Remember the value of a view for as long as the tape lives."""
        base_slot, slot = self._slot(base), self._slot(view)
        if base_slot is not None and slot is not None:
            self._views[base_slot, chain] = slot, view.layout

    def joins(self, layout: int) -> bool:
        """Whether a layout is over the devices of this tape; the first one decides."""
        devices = layouts.devices(layout)
        if len(devices) < 2 or devices == self.devices:
            return True
        if not self.devices:
            self.devices = devices
            return True
        return False

    def _slot(self, value: Value) -> int | None:
        if value.tape is self:
            return value.slot
        return None if value.taken is None else self._index_of.get(value.taken)

    def _revived(self, slot: int, layout: int) -> Value:
        """The value of a slot, made again if it is dead."""
        current = self.slots[slot]
        if isinstance(current, Taken):
            return current.revived()
        value = current()
        if value is None:
            value = Value(None, layout, self, slot)
            self.slots[slot] = _weakly(value)
        return value

    def _take(self, value: Value) -> int:
        """Make a value with an array an input."""
        taken = value.as_taken()
        taken.take(self, value)
        slot = self._index_of[taken] = len(self.slots)
        self.leaves.append(slot)
        self.slots.append(taken)
        self.program.append((value.array.shape, value.array.dtype))
        return slot

    def _successor(self) -> Recorder:
        """The tape to go on with after this one was executed, or grew too long."""
        if not self.done:
            execute(self)
        if recorder() is self:
            replace(self.renewed())
        return recorder()

    def renewed(self) -> Tape:
        """An empty tape in the place of this one."""
        new = Tape()
        new.take_over(self)
        new.opened = self.opened
        if self.repeated is None or not self.program:
            new.noted = OriginLog(self.noted)  # backward may follow in the next tape
        elif new.repeated is not None:
            new.noted = None
            new._expect(new.repeated)
        return new

    def _on_another_mesh(
        self, recipe: Recipe, inputs: Sequence[Value], scalars: Sequence[Any]
    ) -> list[Value]:
        """Execute what is here, and go on with a tape for the other mesh.

        Raises:
            ShardingError: this one operation has inputs that are split over both, or, while a step
                is captured, one that is computed in it.
        """
        if all(value.tape is not self for value in inputs):  # else it is known once it is computed
            inputs = unified(recipe.name, inputs)
        elif self.capture is not None:
            others = [layouts.devices(input_.layout) for input_ in inputs if input_.layout >= 0]
            raise differently_numbered(recipe.name, [*dict.fromkeys([self.devices, *others])])
        execute(self)
        return recorder().record(recipe, inputs, scalars)


_weakly = weakref.ref
_UNPLACED = layouts.UNPLACED


def _settled(value: Value) -> Value:
    """A value of another recorder, computed.

    What a step writes that another thread captures is not there before the capture ends: until
    then the memory is unchanged.
    """
    tape = value.tape
    before = None if tape is None else tape.value_before(value)
    if before is None:
        materialize([value])
        return value
    return before


wire_new(Tape)
