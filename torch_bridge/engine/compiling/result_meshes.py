"""The meshes that users see a program's results on.

A program is compiled under Auto axes. A result that depends on something on a user's Explicit mesh
has its layout on that mesh: that of the first such input, or of a mark on the way, which counts as
later. That depends on what the result is made of only, not on what else the program computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from isoshard.core.layout.mesh import mesh_of
from isoshard.torch_bridge.engine.recording.recipes import RECIPES
from isoshard.torch_bridge.engine.recording.tape import Tape
from isoshard.torch_bridge.engine.values import layout_numbers
from isoshard.torch_bridge.engine.values.value import Value

from .execution_plan import CompileRequest
from .interpreting import needed


def result_layouts(plan: CompileRequest, numbers: Sequence[int]) -> list[int]:
    """The layouts of a plan's results on the meshes that users know.

    Args:
        plan: what was computed.
        numbers: the results' layouts under Auto axes, in the order of `plan.live`.
    """
    named = {*plan.placed, *plan.wanted, *_marks(plan)}
    if all(layout_numbers.typed_mesh(number) is None for number in named):
        return [*numbers]
    meshes = _meshes(plan)
    found = []
    for slot, wanted, number in zip(plan.live, plan.wanted, numbers, strict=True):
        mesh = layout_numbers.typed_mesh(wanted) or meshes[slot]
        found.append(layout_numbers.typed(number, mesh))
    return found


def meshes_behind(value: Value) -> set[jax.sharding.Mesh]:
    """The meshes of what a recorded value is made of: of inputs, and of marks on the way.

    Empty for a value that is computed.
    """
    tape = value.tape
    if not isinstance(tape, Tape):
        return set()
    with tape.lock:
        inputs = iter(tape.inputs())
        numbers: set[int] = set()
        for entry, is_used in zip(tape.program, needed(tape.program, [value.slot]), strict=True):
            recipe = RECIPES[entry[0]] if isinstance(entry[0], int) else None
            number = next(inputs).layout if recipe is None else layout_numbers.UNPLACED
            if recipe is not None and recipe.name == "mark_sharding":
                number = recipe.detail
            if is_used:
                numbers.add(number)
    found = [layout_numbers.sharding(n) for n in numbers - {layout_numbers.UNPLACED}]
    return {mesh_of(one) for one in found if isinstance(one, jax.sharding.NamedSharding)}


def _marks(plan: CompileRequest) -> list[int]:
    entries = [RECIPES[entry[0]] for entry in plan.program if isinstance(entry[0], int)]
    return [recipe.detail for recipe in entries if recipe.name == "mark_sharding"]


def _meshes(plan: CompileRequest) -> list[Any]:
    """For each slot the typed mesh of its layout, or None."""
    placed = iter(plan.placed)
    meshes: list[Any] = []
    for entry in plan.program:
        if not isinstance(entry[0], int):
            meshes.append(layout_numbers.typed_mesh(next(placed)))
            continue
        recipe = RECIPES[entry[0]]
        mesh = next((meshes[slot] for slot in entry[1:] if meshes[slot] is not None), None)
        if recipe.name == "mark_sharding":
            mesh = layout_numbers.typed_mesh(recipe.detail) or mesh
        meshes += [mesh] * recipe.count
    return meshes
