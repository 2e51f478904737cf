"""The entries of a program, computed one after the other while JAX traces."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from isoshard.core.layout.offload import is_on_host, to_device_after
from isoshard.core.runtime.shard_map_axes import checked_axes
from isoshard.torch_bridge.engine.recording.origins import Origin
from isoshard.torch_bridge.engine.recording.recipes import RECIPES, Recipe
from isoshard.torch_bridge.lowerings.cse import shared_program

from .image_layout import Env, Images
from .mask_origins import MaskOrigins
from .rewrites import Rewriter


@dataclasses.dataclass(frozen=True)
class Notes:
    """Origins and names that are attached to the program of a tape.

    Attributes:
        origins: where each entry comes from; None where it is not known.
        names: names for the values of some slots, innermost first, and the shape in which each is
            seen there.
    """

    origins: Sequence[Origin | None] = ()
    names: Mapping[int, Mapping[str, tuple[int, ...]]] = dataclasses.field(
        default_factory=dict[int, Mapping[str, tuple[int, ...]]]
    )

    def at(self, index: int) -> contextlib.AbstractContextManager[Any]:
        """Context in which what JAX traces has the scope of an entry."""
        scope = self.scope(index)
        return jax.named_scope(scope) if scope else contextlib.nullcontext()

    def scope(self, index: int) -> str:
        """The name scope of an entry; "" if its origin is not known."""
        origin = self.origins[index] if index < len(self.origins) else None
        return "" if origin is None else origin.scope

    def of_slots(self, entries: Sequence[Any], slots: Sequence[int]) -> Notes:
        """The origins of the entries that make some slots, in their order."""
        if not self.origins:
            return Notes()
        counts = [RECIPES[e[0]].count if isinstance(e[0], int) else 1 for e in entries]
        origins = [
            origin
            for origin, count in zip(self.origins, counts, strict=False)
            for _ in range(count)
        ]
        return Notes([origins[slot] if slot < len(origins) else None for slot in slots])

    def chosen(self, indices: Sequence[int]) -> Notes:
        """The notes of some entries; names are of slots, and go."""
        origins = self.origins
        return Notes([origins[index] if index < len(origins) else None for index in indices])

    def all_named(self, env: Env, results: list[Any]) -> list[Any]:
        """The next results of a program, those under their names that have any.

        Args:
            env: the values so far; it has those with channels last.
            results: the results; None for one that `env` has.
        """
        for index, slot in enumerate(range(len(env), len(env) + len(results))):
            for name, shape in self.names.get(slot, {}).items():
                if slot in env.last:
                    env.last[slot] = checkpoint_name(env.last[slot], name)
                elif results[index] is not None:
                    results[index] = _named(results[index], name, shape)
        return results


def _named(value: jax.Array, name: str, shape: tuple[int, ...]) -> jax.Array:
    if math.prod(shape) != value.size:  # complex numbers as pairs
        return checkpoint_name(value, name)
    return checkpoint_name(value.reshape(shape), name).reshape(value.shape)


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
        notes: origins and names of entries and slots.
    """
    with shared_program():
        return _computed(entries, needed, inputs, scalars, keys, notes or _NO_NOTES)


def _computed(entries: Any, needed: Any, inputs: Any, scalars: Any, keys: Any, notes: Notes) -> Env:
    leaves = iter(inputs)
    env = Env()
    entry_values, offloaded = EntryValues(env), OffloadedInputs(env)
    taken, is_mapped = 0, bool(checked_axes())
    for index, (entry, is_needed) in enumerate(zip(entries, needed, strict=True)):
        if not isinstance(entry[0], int):
            env.append(next(leaves))
            entry_values.note(None, entry, 1)
            offloaded.note(len(env) - 1)
            continue
        recipe = RECIPES[entry[0]]
        with at_entry(index), notes.at(index):
            floats = [scalars[taken + i] for i in range(recipe.lifted)]
            taken += recipe.lifted
            key = next(keys) if recipe.random else None
            results: list[Any] = [None] * recipe.count
            if is_needed:
                offloaded.fetch(entry[1:])
                if is_mapped:
                    env.let_differ(entry[1:])
                results = entry_values.of(recipe, entry, floats, key)
            if notes.names:
                results = notes.all_named(env, results)
        env += results
        entry_values.note(recipe, entry, len(results), floats)
    return env


class OffloadedInputs:
    """Inputs in the memory of the host, copied to the devices where they are first used.

    An optimizer's state is used once, after the backward pass. It is copied when the operation
    before that one has been computed, so it takes no memory of the devices while activations do.

    Args:
        env: the values of the program's slots; the copies replace those on the host.
    """

    def __init__(self, env: list[Any]):
        """See the class."""
        self._env = env
        self._slots: set[int] = set()

    def note(self, slot: int) -> None:
        """An input has its value."""
        if is_on_host(self._env[slot]):
            self._slots.add(slot)

    def fetch(self, operands: Sequence[int]) -> None:
        """Copy what an operation is about to use, once its other operands are computed."""
        if not self._slots:
            return
        offloaded = [slot for slot in dict.fromkeys(operands) if slot in self._slots]
        if not offloaded:
            return
        env = self._env
        others = [env[slot] for slot in dict.fromkeys(operands) if slot not in self._slots]
        last = next((x for x in reversed(env) if x is not None and not is_on_host(x)), None)
        before = others if last is None else [*others, last]
        for slot, value in zip(
            offloaded, to_device_after([env[s] for s in offloaded], before), strict=True
        ):
            env[slot] = value
        self._slots.difference_update(offloaded)


class EntryValues:
    """Computes entries of a program, in a cheaper way where there is one.

    Args:
        env: the value of each slot so far; who calls this puts the results there.
        makers: what made each of them: recipe, entry and the lifted floats, or None for an input.
        unmerged: of products the value from before its axes were merged, by slot; written, too.
    """

    def __init__(
        self, env: Env, makers: Sequence[Any] = (), unmerged: dict[int, Any] | None = None
    ):
        """See the class."""
        self._env = env
        self._rewriter, self._images = Rewriter(env, makers, unmerged), Images(env)
        self._masks = MaskOrigins(env, self._rewriter.makers)
        self.note = self._rewriter.note

    def of(self, recipe: Recipe, entry: Sequence[int], floats: Sequence[Any], key: Any) -> Any:
        """The values of the next slots; None for one that `env` has with channels last."""
        results = self._rewriter.rewrite(recipe, entry)
        if results is None:
            results = self._images.rewrite(recipe, entry, floats)
        if results is None:
            with self._masks.of_entry(recipe, entry):
                results = recipe.run([self._env[slot] for slot in entry[1:]], floats, key)
        return list(results)


def needed(entries: Sequence[Any], live: Sequence[int]) -> list[bool]:
    """Which entries the results in the slots `live` depend on."""
    counts = [RECIPES[e[0]].count if isinstance(e[0], int) else 1 for e in entries]
    live_slots = set(live)
    is_needed = [False] * len(entries)
    slot = sum(counts)
    for position in reversed(range(len(entries))):
        slot -= counts[position]
        entry = entries[position]
        if not live_slots.isdisjoint(range(slot, slot + counts[position])):
            is_needed[position] = True
            if isinstance(entry[0], int):
                live_slots.update(entry[1:])
    return is_needed


def entry_index(error: Exception) -> int | None:
    """The entry at which a program raised an error while it was traced; None of any other error."""
    return getattr(error, _ENTRY_INDEX, None)


def set_entry_index(error: Exception, index: int) -> None:
    """Declare the entry at fault."""
    setattr(error, _ENTRY_INDEX, index)


@contextlib.contextmanager
def at_entry(index: int) -> Iterator[None]:
    """Context of an entry's computation: errors get its index."""
    try:
        yield
    except Exception as error:
        set_entry_index(error, index)  # the outermost program sets it last
        raise


_ENTRY_INDEX = "_isoshard_place"
