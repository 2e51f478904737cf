"""The layouts of a call's tensors, as far as they are known before the program runs.

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

from isoshard.core.domain import BlockLayout
from isoshard.core.domain.blocks.array_layout import ArrayLayout
from isoshard.core.domain.handlers.handler_arguments import Path, place, whole
from isoshard.core.errors import ShardingError
from isoshard.core.layout.axis_types import auto, is_typed, on_mesh, same_grid
from isoshard.core.layout.mesh import describe_mesh, mesh_of
from isoshard.core.layout.spec import axis_names
from isoshard.core.layout.spec_entries import entries_of
from isoshard.torch_bridge.argument_types import ArrayLike
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.values import layout_numbers
from isoshard.torch_bridge.layout import marks

Known = NamedSharding | BlockLayout | None  # None: whole, wherever it is needed


def read_layouts(
    paths: Sequence[Path], tensors: Sequence[torch.Tensor], name: str
) -> tuple[list[ArrayLayout], Mesh | None]:
    """Find the layouts of tensors, computing those that do not say.

    Args:
        paths: where each stands among the arguments.
        tensors: on the `jax` device; one elsewhere counts as whole.
        name: of the function, for messages.

    Returns:
        A layout for each, and their mesh, under Auto axes; None if none is on one.

    Raises:
        ShardingError: a layout cannot be known, or the meshes differ.
    """
    found = [_known(tensor) for tensor in tensors]
    unknown = [n for n, known in enumerate(found) if known is _UNKNOWN]
    if unknown:
        _check_known([(paths[n], tensors[n]) for n in unknown], name)
        values = [lazy_tensor.read(_lazy(tensors[n])) for n in unknown]
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
            "them out on one: isoshard.reshard(x, mesh, spec)."
        )
    mesh = next(iter(meshes), None)
    pairs = zip(tensors, found, strict=True)
    return [_layout(tuple(tensor.shape), known, mesh) for tensor, known in pairs], mesh


_UNKNOWN: Any = object()


def _known(tensor: torch.Tensor) -> Known:
    """The layout of a tensor; `_UNKNOWN` if nobody has said."""
    if not isinstance(tensor, lazy_tensor.LazyTensor):
        return None
    value = tensor._storage.value
    if marks.is_recorded(tensor):
        known = None if _on_no_mesh(value) else _UNKNOWN
    else:
        known = _placed(value.layout)
    if tensor._chain.ops:  # a view may have another layout, unless all of it is whole
        split = known is _UNKNOWN or (known and any(entries_of(_sharding(known).spec)))
        return _UNKNOWN if split else None
    annotation = tensor._storage.annotation
    return (
        layout_numbers.blocks(value.layout) or (annotation and under_auto_axes(annotation)) or known
    )


def under_auto_axes(known: ArrayLike) -> Any:
    """A layout over a mesh of the same grid with Auto axes."""
    return said_on(known, auto(_sharding(known).mesh))


def said_on(known: ArrayLike, mesh: Mesh | None) -> Any:
    """A layout over another mesh of the same grid; as it is for None, or on another grid."""
    sharding = _sharding(known)
    if mesh is None or not same_grid(sharding.mesh, mesh):
        return known
    same = on_mesh(sharding, mesh)
    return known.on(same) if isinstance(known, BlockLayout) else same


def typed_mesh(tensors: Sequence[torch.Tensor]) -> Mesh | None:
    """The mesh of the first tensor that users see on one with Explicit axes."""
    for tensor in tensors:
        if isinstance(tensor, lazy_tensor.LazyTensor):
            annotation = tensor._storage.annotation
            said = None if annotation is None else mesh_of(_sharding(annotation))
            mesh = said or layout_numbers.typed_mesh(tensor._storage.value.layout)
            if mesh is not None and is_typed(mesh):
                return mesh
    return None


def _placed(number: int) -> Known:
    if number == layout_numbers.UNPLACED:
        return None
    found = layout_numbers.layout(number)
    return found if isinstance(found, NamedSharding | BlockLayout) else None


def _on_no_mesh(value: Any) -> bool:
    """Whether nothing in the program that will compute a value is on a mesh."""
    tape = value.tape
    if not isinstance(tape, tapes.Tape):
        return False
    return not any(_placed(number) for number in tape.layouts())


def _check_known(unknown: Sequence[tuple[Path, torch.Tensor]], name: str) -> None:
    recorded = isinstance(tapes.recorder(), tapes.Tape)
    if recorded and tapes.recorder().capture is None and not tapes.is_tracing():
        return
    where = "while JAX traces" if tapes.is_tracing() else "in a step that is being captured"
    listed = ", ".join(f"{place(path)} (shape {tuple(t.shape)})" for path, t in unknown)
    raise ShardingError(
        f"{name} has a handler, which needs to know how its arguments lie, and {where} nobody has "
        f"said it of {listed}. Mark what you give it: isoshard.torch_bridge.mark_sharding(t, mesh, "
        "spec)."
    )


def _lazy(tensor: Any) -> lazy_tensor.LazyTensor:
    return tensor


def _sharding(known: NamedSharding | BlockLayout) -> NamedSharding:
    return known.sharding if isinstance(known, BlockLayout) else known


@functools.lru_cache(maxsize=1024)
def _layout(shape: tuple[int, ...], known: Known, mesh: Mesh | None) -> ArrayLayout:
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
    return ArrayLayout(mesh, names, tuple(sizes), tuple(blocks), uneven is not None)
