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
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.engine.values.value import Value

from .compile_request import CompileRequest
from .interpreting import needed


def result_layouts(plan: CompileRequest, layout_ids: Sequence[int]) -> list[int]:
    """The layouts of a plan's results on the users' own meshes.

    Args:
        plan: what was computed.
        layout_ids: the results' layouts under Auto axes, in the order of `plan.live`.
    """
    if not are_restated({*plan.placed, *plan.result_layouts, *_marks(plan)}):
        return [*layout_ids]
    behind = _meshes(plan)
    layouts = []
    for slot, marked, layout_id in zip(plan.live, plan.result_layouts, layout_ids, strict=True):
        meshes = [*_candidates(marked), *behind[slot]]
        for mesh, _ in sorted(
            meshes, key=lambda candidate: (not is_typed(candidate[0]), not candidate[1])
        ):
            restated = sharding_ids.restated_on(layout_id, mesh)
            if sharding_ids.users_mesh(restated) == mesh:
                layout_id = restated
                break
        layouts.append(layout_id)
    return layouts


def are_restated(layout_ids: Collection[int]) -> bool:
    """Whether users see arrays of a program on other meshes than the program has them on."""
    meshes = {*map(sharding_ids.users_mesh, layout_ids)} - {None}
    return len(meshes) > 1 or any(map(sharding_ids.is_restated, layout_ids))


@cached(4096)
def coarser_sharding(
    layout: jax.sharding.Sharding, shape: tuple[int, ...], mesh: jax.sharding.Mesh
) -> jax.sharding.NamedSharding:
    """The finest layout over a mesh whose blocks contain those of another layout.

    Args:
        layout: splits by parts of mesh axes, so that no `NamedSharding` over the mesh expresses it.
        shape: of the array.
        mesh: of its devices.

    >>> from isoshard import P, make_mesh
    >>> fine, coarse = make_mesh((2, 2, 2), ("a", "b", "c")), make_mesh((2, 4), ("x", "y"))
    >>> split = jax.sharding.NamedSharding(fine, P("a", "b"))  # "b" is a part of "y"
    >>> coarser_sharding(split, (4, 8), coarse).spec
    P('x', None)
    """
    blocks = layout.devices_indices_map(shape)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
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
            entries, sharding = more, tried
    return sharding


def _within(block: Sequence[slice], other: Sequence[slice], shape: Sequence[int]) -> bool:
    """Whether a block of an array of a shape is inside another."""
    for inner, larger, size in zip(block, other, shape, strict=True):
        (start, stop, _), (least, most, _) = inner.indices(size), larger.indices(size)
        if start < least or stop > most:
            return False
    return True


def meshes_behind(value: Value) -> set[jax.sharding.Mesh]:
    """The meshes that a recorded value comes from: of inputs, and of marks on the way.

    Empty for a value that is computed.
    """
    tape = value.tape
    if not isinstance(tape, Tape):
        return set()
    with tape.lock:
        inputs = iter(tape.inputs())
        layout_ids: set[int] = set()
        for entry, is_used in zip(tape.program, needed(tape.program, [value.slot]), strict=True):
            recipe = RECIPES[entry[0]] if isinstance(entry[0], int) else None
            layout_id = next(inputs).layout if recipe is None else sharding_ids.UNPLACED
            if recipe is not None and recipe.name == "mark_sharding":
                layout_id = recipe.detail
            if is_used:
                layout_ids.add(layout_id)
    return {auto(mesh) for mesh in map(sharding_ids.users_mesh, layout_ids) if mesh is not None}


def _marks(plan: CompileRequest) -> list[int]:
    entries = [RECIPES[entry[0]] for entry in plan.program if isinstance(entry[0], int)]
    return [recipe.detail for recipe in entries if recipe.name == "mark_sharding"]


_Candidate = tuple[jax.sharding.Mesh, bool]
"""A mesh that a result may be seen on, and whether something is split over it."""


def _meshes(plan: CompileRequest) -> list[tuple[_Candidate, ...]]:
    """For each slot the meshes that it comes from, in order."""
    placed = iter(plan.placed)
    meshes: list[tuple[_Candidate, ...]] = []
    for entry in plan.program:
        if not isinstance(entry[0], int):
            meshes.append(_candidates(next(placed)))
            continue
        recipe = RECIPES[entry[0]]
        result = dict.fromkeys(mesh for slot in entry[1:] for mesh in meshes[slot])
        if recipe.name == "mark_sharding":
            result = dict.fromkeys((*_candidates(recipe.detail), *result))
        meshes += [tuple(result)] * recipe.count
    return meshes


@cached(4096)
def _candidates(layout_id: int) -> tuple[_Candidate, ...]:
    """The mesh of a layout as users see it; empty without one."""
    mesh = sharding_ids.users_mesh(layout_id)
    if mesh is None:
        return ()
    sharding: Any = sharding_ids.sharding(layout_id)
    return ((mesh, any(sharding.spec)),)
