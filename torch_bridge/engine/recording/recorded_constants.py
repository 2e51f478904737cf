"""Recorded values that depend on nothing but the code: known without executing the tape.

transformers asks in each forward pass whether positions that it has just counted from 0 are those
of several packed sequences. Executing all that was recorded so far for the answer would divide
every step in two programs. What depends on no input, no random number and no changing float is
computed apart, once for each such computation, and is then a constant of the host:

>>> import torch, isoshard as iso, isoshard.torch_bridge as xs
>>> xs.sync()
>>> pending = torch.ones(2, device="jax").cumsum(0)
>>> before = iso.metrics.counters()["executions"]
>>> bool((torch.arange(4, device="jax").diff() == 1).all())
True
>>> iso.metrics.counters()["executions"] - before
0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from isoshard.core.runtime.caches import PROGRAMS, Bounded

from .recipes import RECIPES, Recipe

MAX_ENTRIES = 64
"""Operations of the longest computation that is looked for."""

_Computed = tuple[np.ndarray, tuple[Recipe, ...]]
_CONSTANTS: Bounded[Any, _Computed] = Bounded(PROGRAMS, "engine: constants of recorded code")


def constant_of(program: Sequence[Any], num_slots: int, slot: int) -> np.ndarray | None:
    """The elements of the value in a slot, if they depend on no input.

    Args:
        program: the entries of a tape.
        num_slots: how many slots they have.
        slot: of the value.
    """
    needed, entries, end = {slot}, list[tuple[int, Any]](), num_slots
    for entry in reversed(program):
        recipe = RECIPES[entry[0]] if isinstance(entry[0], int) else None
        begin = end - (1 if recipe is None else recipe.count)
        if not needed.isdisjoint(range(begin, end)):
            if recipe is None or not _is_fixed(recipe) or len(entries) == MAX_ENTRIES:
                return None
            needed.difference_update(range(begin, end))
            needed.update(entry[1:])
            entries.append((begin, entry))
        if not needed:
            break
        end = begin
    entries.reverse()
    return _computed(entries, slot)


def _is_fixed(recipe: Recipe) -> bool:
    return not (recipe.random or recipe.lifted or recipe.name == "mark_sharding")


def _computed(entries: Sequence[tuple[int, Any]], slot: int) -> np.ndarray:
    index_of: dict[int, int] = {}
    recipes, key = [], []
    for begin, (recipe_id, *operands) in entries:
        recipes.append(RECIPES[recipe_id])
        key.append((recipe_id, *[index_of[operand] for operand in operands]))
        for result in range(begin, begin + recipes[-1].count):
            index_of[result] = len(index_of)
    index = index_of[slot]
    cached = _CONSTANTS.get((*key, index))
    if cached is None:

        def run() -> Any:
            values: list[Any] = []
            for recipe, (_, *operands) in zip(recipes, key, strict=True):
                values += recipe.run([values[operand] for operand in operands], [], None)
            return values[index]

        with jax.enable_x64(True), jax.ensure_compile_time_eval():
            elements = np.asarray(jax.jit(run)())
        cached = _CONSTANTS[(*key, index)] = elements, tuple(recipes)
    return cached[0]
