"""A subprogram: entries of a `SubTrace`, as a pure function that can be compared and hashed.

Two runs of the same code give equal subprograms, so what was compiled for one serves the other,
although the code ran twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from isoshard.torch_bridge.engine.compiling.interpreting import Notes, interpret
from isoshard.torch_bridge.engine.recording import random_state
from isoshard.torch_bridge.engine.recording.origins import Origin
from isoshard.torch_bridge.engine.recording.recipes import RECIPES, Recipe
from isoshard.torch_bridge.engine.values.views import Chain

from .subtrace import SubTrace


@dataclasses.dataclass(frozen=True)
class Subprogram:
    """A function of arrays, lifted floats and a PRNG key.

    Attributes:
        program: its entries; first one for each input.
        live: slots of its results.
        draws: for each entry that draws, which key it takes; see `SubTrace.draws`.
        scalars: which of the recording's lifted floats it takes.
        recipes: the recipes by the ids in the entries.
        origins: where each entry comes from; None for an input.
    """

    program: tuple[Any, ...]
    live: tuple[int, ...]
    draws: tuple[Any, ...]
    scalars: tuple[int, ...]
    recipes: frozenset[Recipe] = dataclasses.field(repr=False, compare=False)
    origins: tuple[Origin | None, ...] = dataclasses.field(default=(), repr=False, compare=False)

    def run(self, inputs: Sequence[Any], scalars: Any, key: Any) -> list[Any]:
        """Its results, while JAX traces.

        Args:
            inputs: one array per input.
            scalars: the floats that `scalars` names.
            key: what its keys are made from; None if it draws none.
        """
        needed = [True] * len(self.program)
        keys = self._keys(key)
        env = interpret(self.program, needed, inputs, scalars, keys, Notes(self.origins))
        return [env[slot] for slot in self.live]

    def _keys(self, key: Any) -> Iterator[Any]:
        for draw in self.draws:
            if isinstance(draw, tuple):
                yield from random_state.keys(jax.numpy.asarray([draw], np.uint32))
            else:
                yield jax.random.fold_in(key, draw)


def extract(subtrace: SubTrace, inputs: Sequence[int], outputs: Sequence[int]) -> Subprogram:
    """The function that computes some slots from others.

    Args:
        subtrace: what was recorded.
        inputs: slots of its inputs; the inputs of the recording that it needs are among them.
        outputs: slots of its results.
    """
    index_of = {slot: index for index, slot in enumerate(inputs)}
    entries, needed = [], set(outputs) - set(inputs)
    described = reversed([*zip(_described(subtrace), subtrace.noted.origins, strict=True)])
    for (entry, first, count, floats, draw), origin in described:
        if needed.isdisjoint(range(first, first + count)):
            continue
        entries.append((entry, first, count, floats, draw, origin))
        needed.update(slot for slot in entry[1:] if slot not in index_of)
    program: list[Any] = [_input(subtrace, slot) for slot in inputs]
    at, draws, scalars = len(program), [], []
    origins: list[Origin | None] = [None] * len(program)
    for entry, first, count, floats, draw, origin in reversed(entries):
        origins.append(origin)
        program.append((entry[0], *[index_of[slot] for slot in entry[1:]]))
        for slot in range(first, first + count):
            index_of.setdefault(slot, at + slot - first)
        at += count
        scalars += floats
        draws += [] if draw is None else [subtrace.draws[draw]]
    live = tuple([index_of[slot] for slot in outputs])
    used = frozenset([RECIPES[entry[0]] for entry, *_ in entries])
    return Subprogram(tuple(program), live, tuple(draws), tuple(scalars), used, tuple(origins))


def needed_slots(
    subtrace: SubTrace, outputs: Sequence[int], available: Sequence[int], boundary: int
) -> tuple[list[int], list[int]]:
    """What a later part of the recording takes from an earlier one.

    Views of something taken are made again instead.

    Returns:
        The slots that it takes of those available, and its residuals.
    """
    at_hand, seen = set(available), set()
    used, residuals, stack = set(), set(), list(outputs)
    while stack:
        slot = stack.pop()
        if slot in seen:
            continue
        seen.add(slot)
        entry = subtrace.maker(slot)
        if slot in at_hand:
            used.add(slot)
        elif entry is not None and (slot >= boundary or _is_view(entry)):
            stack += entry[1:]
        else:
            residuals.add(slot)
    return sorted(used), sorted(residuals)


def _is_view(entry: Sequence[int]) -> bool:
    recipe = RECIPES[entry[0]]
    return recipe.name == "view" and isinstance(recipe.detail, Chain)


def _input(subtrace: SubTrace, slot: int) -> Any:
    """The entry of an input: shape and dtype, where the recording has them."""
    return subtrace.tokens.get(slot, ((), "computed before"))


def _described(subtrace: SubTrace) -> list[Any]:
    """The operations: entry, first slot, number of slots, floats, and which draw it is."""
    described, slot, floats, draws = [], 0, 0, 0
    for entry in subtrace.program:
        if not isinstance(entry[0], int):
            slot += 1
            continue
        recipe = RECIPES[entry[0]]
        lifted = range(floats, floats + recipe.lifted)
        described.append((entry, slot, recipe.count, lifted, draws if recipe.random else None))
        slot, floats, draws = slot + recipe.count, floats + recipe.lifted, draws + recipe.random
    return described
