"""How the tensors of a call lie, as far as that is known before the program runs.

A tensor that holds its value knows, one that was marked as well. What was computed from others and
is not executed yet does not: its layout is the partitioner's choice. Such a value is computed now,
as `to_local()` does, where its program is on a mesh at all; in a captured step or while JAX traces
that cannot be, and a mark is asked for. Nothing is gathered to find out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from jax.sharding import Mesh, NamedSharding

from isoshard.core.axis_types import auto, is_typed, on_mesh, same_grid
from isoshard.core.domain import BlockLayout
from isoshard.core.domain.handlers.arguments import Path, place, whole
from isoshard.core.domain.layouts import Layout
from isoshard.core.entries import entries_of
from isoshard.core.errors import ShardingError
from isoshard.core.mesh import describe_mesh, mesh_of
from isoshard.core.spec import axis_names
from isoshard.torch_bridge.engine import base, layouts
from isoshard.torch_bridge.engine import tape as tapes
from isoshard.torch_bridge.layout import marks

Known = NamedSharding | BlockLayout | None  # None: whole, wherever it is needed


def read_layouts(
    paths: Sequence[Path], tensors: Sequence[torch.Tensor], name: str
) -> tuple[list[Layout], Mesh | None]:
    """Find out how tensors lie, computing those that do not say.

    Args:
        paths: where each stands among the arguments.
        tensors: on the `jax` device; one elsewhere counts as whole.
        name: of the function, for messages.

    Returns:
        A layout for each, and their mesh, under Auto axes; None if none lies on one.

    Raises:
        ShardingError: a layout cannot be known, or the meshes differ.
    """
    found = [_known(tensor) for tensor in tensors]
    unknown = [n for n, known in enumerate(found) if known is _UNKNOWN]
    if unknown:
        _check_known([(paths[n], tensors[n]) for n in unknown], name)
        values = [base.read(_lazy(tensors[n])) for n in unknown]
        tapes.materialize(values)
        for n, value in zip(unknown, values, strict=True):
            found[n] = _placed(value.layout)
    meshes: dict[Mesh, list[str]] = {}
    for path, known in zip(paths, found, strict=True):
        if known is not None:
            meshes.setdefault(mesh_of(_sharding(known)), []).append(place(path))
    if len(meshes) > 1:
        lines = [f"{', '.join(own)} on {describe_mesh(mesh)}" for mesh, own in meshes.items()]
        raise ShardingError(
            f"{name}: the arguments lie on {len(meshes)} different meshes: {'; '.join(lines)}. Lay "
            "them out on one: isoshard.reshard(x, spec, mesh)."
        )
    mesh = next(iter(meshes), None)
    pairs = zip(tensors, found, strict=True)
    return [_layout(tuple(tensor.shape), known, mesh) for tensor, known in pairs], mesh


_UNKNOWN: Any = object()


def _known(tensor: torch.Tensor) -> Known:
    """The layout of a tensor; `_UNKNOWN` if nobody has said."""
    if not isinstance(tensor, base.LazyTensor):
        return None
    value = tensor._storage.value
    if marks.is_recorded(tensor):
        known = None if _on_no_mesh(value) else _UNKNOWN
    else:
        known = _placed(value.layout)
    if tensor._chain.ops:  # a view may lie otherwise, unless all of it is whole
        split = known is _UNKNOWN or (known and any(entries_of(_sharding(known).spec)))
        return _UNKNOWN if split else None
    annotation = tensor._storage.annotation
    return layouts.blocks(value.layout) or (annotation and under_auto_axes(annotation)) or known


def under_auto_axes(known: Any) -> Any:
    """A layout over a mesh of the same grid with Auto axes."""
    return said_on(known, auto(_sharding(known).mesh))


def said_on(known: Any, mesh: Mesh | None) -> Any:
    """A layout over another mesh of the same grid; as it is for None, or on another grid."""
    sharding = _sharding(known)
    if mesh is None or not same_grid(sharding.mesh, mesh):
        return known
    same = on_mesh(sharding, mesh)
    return known.on(same) if isinstance(known, BlockLayout) else same


def typed_mesh(tensors: Sequence[torch.Tensor]) -> Mesh | None:
    """The mesh of the first tensor that users see on one with Explicit axes."""
    for tensor in tensors:
        if isinstance(tensor, base.LazyTensor):
            annotation = tensor._storage.annotation
            said = None if annotation is None else mesh_of(_sharding(annotation))
            mesh = said or layouts.typed_mesh(tensor._storage.value.layout)
            if mesh is not None and is_typed(mesh):
                return mesh
    return None


def _placed(number: int) -> Known:
    if number == layouts.UNPLACED:
        return None
    found = layouts.layout(number)
    return found if isinstance(found, NamedSharding | BlockLayout) else None


def _on_no_mesh(value: Any) -> bool:
    """Whether nothing in the program that will compute a value lies on a mesh."""
    tape = value.tape
    if not isinstance(tape, tapes.Tape):
        return False
    return not any(_placed(number) for number in tape.layouts())


def _check_known(unknown: Sequence[tuple[Path, torch.Tensor]], name: str) -> None:
    recorded = isinstance(tapes.recorder(), tapes.Tape)
    if recorded and tapes.recorder().capture is None and not tapes.is_tracing():
        return
    where = "while JAX traces" if tapes.is_tracing() else "in a step that is being captured"
    told = ", ".join(f"{place(path)} (shape {tuple(t.shape)})" for path, t in unknown)
    raise ShardingError(
        f"{name} has a handler, which needs to know how its arguments lie, and {where} nobody has "
        f"said it of {told}. Mark what you give it: isoshard.torch_bridge.mark_sharding(t, mesh, "
        "spec)."
    )


def _lazy(tensor: Any) -> base.LazyTensor:
    return tensor


def _sharding(known: NamedSharding | BlockLayout) -> NamedSharding:
    return known.sharding if isinstance(known, BlockLayout) else known


@functools.lru_cache(maxsize=1024)
def _layout(shape: tuple[int, ...], known: Known, mesh: Mesh | None) -> Layout:
    if known is None or mesh is None:
        return whole(shape, mesh)
    entries = (*entries_of(_sharding(known).spec), *[None] * len(shape))[: len(shape)]
    names = tuple(map(axis_names, entries))
    uneven = known if isinstance(known, BlockLayout) else None
    padded = uneven.padded if uneven else shape
    blocks, sizes = [], []
    for axis, extent in enumerate(padded):
        count = math.prod(mesh.shape[name] for name in names[axis])
        own = uneven.sizes[axis] if uneven else None
        blocks.append(extent // count)
        sizes.append((extent // count,) * count if own is None else own)
    return Layout(mesh, names, tuple(sizes), tuple(blocks), uneven is not None)
