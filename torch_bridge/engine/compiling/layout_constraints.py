"""Layout constraints as tape entries."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from isoshard.core.blocks.block_layout import lay_in_blocks
from isoshard.torch_bridge.engine.recording.recipes import Recipe
from isoshard.torch_bridge.engine.recording.recorder import materialize, recorder
from isoshard.torch_bridge.engine.recording.tape import Tape
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.engine.values.common_mesh import refined
from isoshard.torch_bridge.engine.values.value import Value

_RECIPES: dict[int, Recipe] = {}


def constrain(value: Value, layout: int) -> Value:
    """The same value, constrained to a sharding wherever the program has it."""
    tape = recorder()
    layout = tape.meant(layout)
    recipe = _RECIPES.get(layout)
    if recipe is None:

        def run(
            arrays: Sequence[jax.Array], _scalars: Sequence[jax.Array], _key: jax.Array | None
        ) -> list[jax.Array]:
            return [lay_in_blocks(arrays[0], sharding_ids.computed(refined(layout)))]

        recipe = _RECIPES[layout] = Recipe("mark_sharding", run, 1, detail=layout)
    if isinstance(tape, Tape) and value.tape is tape and not tape.joins(layout):
        materialize([value])
        value.shared = True  # two values with one array
        value = Value(value.array, layout)
        value.shared = True
        tape = recorder()
    result = tape.record(recipe, (value,))[0]
    if result.array is None:
        result.layout = layout
        if isinstance(result.tape, Tape):
            result.tape.marks.add(layout)
    return result


def same(tape: Tape, value: Value) -> Value:
    """Record a copy of a value on a tape."""
    result = tape.record(_SAME, (value,))[0]
    result.layout = value.layout
    return result


_SAME = Recipe("copy", lambda arrays, _scalars, _key: [arrays[0]], 1)
