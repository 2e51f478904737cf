"""The meshes that users see a program's results on.

A program is compiled under Auto axes, and over a finer mesh where it names several (`common_mesh`).
A result has its layout on a mesh that it is made of: that of an input, or of a mark on the way,
which counts before the inputs of what is marked. Of several it is the first with Explicit axes,
else the first that something is split over, else the first. That depends on what the result is made
of only, not on what else the program computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import jax

from isoshard.core.layout.axis_types import auto, is_typed
from isoshard.core.runtime.caches import cached
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
    if not are_restated({*plan.placed, *plan.wanted, *_marks(plan)}):
        return [*numbers]
    behind = _meshes(plan)
    found = []
    for slot, wanted, number in zip(plan.live, plan.wanted, numbers, strict=True):
        meshes = [*_candidates(wanted), *behind[slot]]
        for mesh, _ in sorted(meshes, key=lambda one: (not is_typed(one[0]), not one[1])):
            said = layout_numbers.said_on(number, mesh)
            if layout_numbers.users_mesh(said) == mesh:
                number = said
                break
        found.append(number)
    return found


def are_restated(numbers: Collection[int]) -> bool:
    """Whether users see arrays of a program on other meshes than the program has them on.

    Args:
        numbers: the layouts that the program names.
    """
    meshes = {*map(layout_numbers.users_mesh, numbers)} - {None}
    return len(meshes) > 1 or any(map(layout_numbers.is_restated, numbers))


@cached(4096)
def named_part(
    layout: jax.sharding.Sharding, shape: tuple[int, ...], mesh: jax.sharding.Mesh
) -> jax.sharding.NamedSharding:
    """The finest layout over a mesh whose blocks hold those of another layout.

    Args:
        layout: splits by parts of axes somewhere, so that no `NamedSharding` says how.
        shape: of the array.
        mesh: of its devices.

    >>> from isoshard import P, make_mesh
    >>> fine, coarse = make_mesh((2, 2, 2), ("a", "b", "c")), make_mesh((2, 4), ("x", "y"))
    >>> split = jax.sharding.NamedSharding(fine, P("a", "b"))  # "b" is a part of "y"
    >>> named_part(split, (4, 8), coarse).spec
    P('x', None)
    """
    blocks = layout.devices_indices_map(shape)
    found = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    entries: list[tuple[str, ...]] = [()] * len(shape)
    for dim, axis in itertools.product(range(len(shape)), mesh.axis_names):
        if any(axis in axes for axes in entries):
            continue
        more = [axes + (axis,) * (n == dim) for n, axes in enumerate(entries)]
        tried = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*more))
        try:
            larger = tried.devices_indices_map(shape)
        except ValueError:  # does not divide
            continue
        if all(_within(blocks[device], larger[device], shape) for device in blocks):
            entries, found = more, tried
    return found


def _within(block: Sequence[slice], other: Sequence[slice], shape: Sequence[int]) -> bool:
    """Whether a block of an array of a shape lies in another."""
    for mine, larger, size in zip(block, other, shape, strict=True):
        (start, stop, _), (least, most, _) = mine.indices(size), larger.indices(size)
        if start < least or stop > most:
            return False
    return True


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
    return {auto(mesh) for mesh in map(layout_numbers.users_mesh, numbers) if mesh is not None}


def _marks(plan: CompileRequest) -> list[int]:
    entries = [RECIPES[entry[0]] for entry in plan.program if isinstance(entry[0], int)]
    return [recipe.detail for recipe in entries if recipe.name == "mark_sharding"]


_Candidate = tuple[jax.sharding.Mesh, bool]
"""A mesh that a result may be seen on, and whether something is split over it."""


def _meshes(plan: CompileRequest) -> list[tuple[_Candidate, ...]]:
    """For each slot the meshes of what it is made of, the first first."""
    placed = iter(plan.placed)
    meshes: list[tuple[_Candidate, ...]] = []
    for entry in plan.program:
        if not isinstance(entry[0], int):
            meshes.append(_candidates(next(placed)))
            continue
        recipe = RECIPES[entry[0]]
        found = dict.fromkeys(one for slot in entry[1:] for one in meshes[slot])
        if recipe.name == "mark_sharding":
            found = dict.fromkeys((*_candidates(recipe.detail), *found))
        meshes += [tuple(found)] * recipe.count
    return meshes


@cached(4096)
def _candidates(number: int) -> tuple[_Candidate, ...]:
    """The mesh of a layout as users see it; empty without one."""
    mesh = layout_numbers.users_mesh(number)
    if mesh is None:
        return ()
    found: Any = layout_numbers.sharding(number)
    return ((mesh, any(found.spec)),)
