"""Layout constraints as tape entries."""

from __future__ import annotations

from isoshard.core.domain import lay_in_blocks

from . import layouts
from . import tape as tapes
from .refine import refined
from .tape import Recipe
from .value import Value

_RECIPES: dict[int, Recipe] = {}


def constrain(value: Value, layout: int) -> Value:
    """The same value, laid out as asked wherever the program holds it.

    Args:
        value: recorded or placed.
        layout: a layout number.
    """
    recipe = _RECIPES.get(layout)
    if recipe is None:

        def run(arrays, _scalars, _key):
            return [lay_in_blocks(arrays[0], layouts.layout(refined(layout)))]

        recipe = _RECIPES[layout] = Recipe("mark_sharding", run, 1, detail=layout)
    tape = tapes.recorder()
    if isinstance(tape, tapes.Tape) and value.tape is tape and not tape.joins(layout):
        tapes.materialize([value])
        value = Value(value.array, layout)
        tape = tapes.recorder()
    result = tape.record(recipe, (value,))[0]
    if result.array is None:
        result.layout = layout
        if isinstance(result.tape, tapes.Tape):
            result.tape.marks.add(layout)
    return result


def same(tape: tapes.Tape, value: Value) -> Value:
    """Record a copy of a value on a tape."""
    result = tape.record(_SAME, (value,))[0]
    result.layout = value.layout
    return result


_SAME = Recipe("copy", lambda arrays, _scalars, _key: [arrays[0]], 1)
