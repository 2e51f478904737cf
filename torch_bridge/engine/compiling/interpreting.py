"""The entries of a program, computed one after the other while JAX traces."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from isoshard.core.planner.traced import source_lines
from isoshard.torch_bridge.engine.recording.recipes import RECIPES
from isoshard.torch_bridge.lowerings.cse import one_program

from .image_layout import Env, Images
from .offloaded_inputs import OffloadedInputs
from .peephole import Rewriter


@dataclasses.dataclass(frozen=True)
class Notes:
    """What a plan wants to find again in the program of a tape.

    Attributes:
        lines: of each entry the line of user code that it comes from; "" where none is known.
        names: names for the values of some slots, innermost first.
    """

    lines: Sequence[str] = ()
    names: Mapping[int, Sequence[str]] = dataclasses.field(default_factory=dict[int, Sequence[str]])

    def at(self, place: int) -> contextlib.AbstractContextManager[Any]:
        """Context in which what JAX traces comes from the line of an entry."""
        line = self.lines[place] if place < len(self.lines) else ""
        if not line:
            return contextlib.nullcontext()
        return jax.named_scope(source_lines.scope_of(line))

    def named(self, slot: int, value: Any) -> Any:
        """A value under its names."""
        for name in self.names.get(slot, ()):
            value = checkpoint_name(value, name)
        return value


_NO_NOTES = Notes()


def interpret(
    entries: Sequence[Any],
    needed: Sequence[bool],
    inputs: Sequence[Any],
    scalars: Any,
    keys: Iterator[Any],
    notes: Notes | None = None,
) -> Env:
    """The value of each slot of a program.

    Args:
        entries: the program, as `Tape.program`.
        needed: which of the entries are computed.
        inputs: a value for each entry that is an input.
        scalars: the lifted floats, in order of use.
        keys: a PRNG key for each entry that draws.
        notes: what to say of entries and slots.
    """
    with one_program():
        return _computed(entries, needed, inputs, scalars, keys, notes or _NO_NOTES)


def _computed(entries: Any, needed: Any, inputs: Any, scalars: Any, keys: Any, notes: Notes) -> Env:
    leaves = iter(inputs)
    env = Env()
    rewriter, images, resting = Rewriter(env), Images(env), OffloadedInputs(env)
    taken = 0
    for place, (entry, is_needed) in enumerate(zip(entries, needed, strict=True)):
        if not isinstance(entry[0], int):
            env.append(next(leaves))
            rewriter.note(None, entry, 1)
            resting.note(len(env) - 1)
            continue
        recipe = RECIPES[entry[0]]
        floats = [scalars[taken + i] for i in range(recipe.lifted)]
        taken += recipe.lifted
        key = next(keys) if recipe.random else None
        try:
            with notes.at(place):
                if is_needed:
                    resting.wake(entry[1:])
                got = rewriter.rewrite(recipe, entry) if is_needed else [None] * recipe.count
                if got is None:
                    got = images.rewrite(recipe, entry, floats)
                if got is None:
                    got = recipe.run([env[slot] for slot in entry[1:]], floats, key)
        except Exception as error:
            setattr(error, _PLACE, place)  # of the outermost program, which is the last to say so
            raise
        for slot in range(len(env), len(env) + len(got)) if notes.names else ():
            if slot in notes.names and slot in env.last:
                env.last[slot] = notes.named(slot, env.last[slot])
            elif slot in notes.names and got[slot - len(env)] is not None:
                got = [*got]
                got[slot - len(env)] = notes.named(slot, got[slot - len(env)])
        env += got
        rewriter.note(recipe, entry, len(got))
    return env


def needed(entries: Sequence[Any], live: Sequence[int]) -> list[bool]:
    """Which entries the results in the slots `live` depend on."""
    counts = [RECIPES[e[0]].count if isinstance(e[0], int) else 1 for e in entries]
    wanted = set(live)
    found = [False] * len(entries)
    slot = sum(counts)
    for position in reversed(range(len(entries))):
        slot -= counts[position]
        entry = entries[position]
        if not wanted.isdisjoint(range(slot, slot + counts[position])):
            found[position] = True
            if isinstance(entry[0], int):
                wanted.update(entry[1:])
    return found


def place_of(error: Exception) -> int | None:
    """The entry at which a program raised an error while it was traced; None of any other error."""
    return getattr(error, _PLACE, None)


_PLACE = "_isoshard_place"
