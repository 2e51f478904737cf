"""The shardings of a call's tensors, before the program runs.

A tensor with a value has a sharding, and so has a marked one. A result of recorded operations that
is not executed yet does not: its sharding is the partitioner's choice. Such a value is computed
now, as `to_local()` does, where its program is on a mesh at all; in a captured step or while JAX
traces that cannot be, and the error requires a mark. Nothing is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jax.sharding import Mesh, NamedSharding

from isoshard.core.kit import (
    ArrayLayout,
    BlockLayout,
    ShardingError,
    auto,
    cached,
    describe_mesh,
    entries_of,
    is_typed,
    mesh_of,
    on_mesh,
    same_grid,
)
from isoshard.core.kit import spec_axis_names as axis_names
from isoshard.domain.handlers.handler_arguments import Path, describe_path, replicated_layout
from isoshard.torch_bridge.kit import ArrayLike, lazy_tensor, marks, sharding_ids
from isoshard.torch_bridge.kit import tape as tapes

OperandLayout = NamedSharding | BlockLayout | None  # None: replicated


def read_layouts(
    paths: Sequence[Path], tensors: Sequence[torch.Tensor], name: str
) -> tuple[list[ArrayLayout], Mesh | None]:
    """Find the shardings of tensors, computing those without one."""
    layouts = [_operand_layout(tensor) for tensor in tensors]
    unknown = [n for n, layout in enumerate(layouts) if layout is _UNKNOWN]
    if unknown:
        _check_readable([(paths[n], tensors[n]) for n in unknown], name)
        values = [lazy_tensor.read(_lazy(tensors[n])) for n in unknown]
        tapes.materialize(values)
        for n, value in zip(unknown, values, strict=True):
            layouts[n] = _placed(value.layout)
    meshes: dict[Mesh, list[str]] = {}
    for path, layout in zip(paths, layouts, strict=True):
        if layout is not None:
            meshes.setdefault(mesh_of(_sharding(layout)), []).append(describe_path(path))
    if len(meshes) > 1:
        lines = [
            f"{', '.join(operands)} on {describe_mesh(mesh)}" for mesh, operands in meshes.items()
        ]
        raise ShardingError(
            f"{name}: the arguments are on {len(meshes)} different meshes: {'; '.join(lines)}. "
            "Move them to one: isoshard.reshard(x, mesh, spec)."
        )
    mesh = next(iter(meshes), None)
    pairs = zip(tensors, layouts, strict=True)
    return [_layout(tuple(tensor.shape), layout, mesh) for tensor, layout in pairs], mesh


_UNKNOWN: Any = object()


def _operand_layout(tensor: torch.Tensor) -> OperandLayout:
    """The sharding of a tensor; `_UNKNOWN` if the partitioner has yet to choose it."""
    if not isinstance(tensor, lazy_tensor.LazyTensor):
        return None
    value = tensor._storage.value
    if marks.is_recorded(tensor):
        layout = None if _on_no_mesh(value) else _UNKNOWN
    else:
        layout = _placed(value.layout)
    if tensor._chain.ops:  # a view may have another sharding, unless all of it is not split
        split = layout is _UNKNOWN or (layout and any(entries_of(_sharding(layout).spec)))
        return _UNKNOWN if split else None
    annotation = tensor._storage.annotation
    return (
        sharding_ids.blocks(value.layout) or (annotation and under_auto_axes(annotation)) or layout
    )


def under_auto_axes(layout: ArrayLike) -> Any:
    """A layout over a mesh of the same grid with Auto axes."""
    return layout_on(layout, auto(_sharding(layout).mesh))


def layout_on(layout: ArrayLike, mesh: Mesh | None) -> Any:
    """A layout over another mesh of the same grid; as it is for None, or on another grid."""
    sharding = _sharding(layout)
    if mesh is None or not same_grid(sharding.mesh, mesh):
        return layout
    same = on_mesh(sharding, mesh)
    return layout.on(same) if isinstance(layout, BlockLayout) else same


def typed_mesh(tensors: Sequence[torch.Tensor]) -> Mesh | None:
    """The mesh of the first tensor that users see on one with Explicit axes."""
    for tensor in tensors:
        if isinstance(tensor, lazy_tensor.LazyTensor):
            annotation = tensor._storage.annotation
            annotated = None if annotation is None else mesh_of(_sharding(annotation))
            mesh = annotated or sharding_ids.typed_mesh(tensor._storage.value.layout)
            if mesh is not None and is_typed(mesh):
                return mesh
    return None


def _placed(index: int) -> OperandLayout:
    if index == sharding_ids.UNPLACED:
        return None
    layout = sharding_ids.layout(index)
    return layout if isinstance(layout, NamedSharding | BlockLayout) else None


def _on_no_mesh(value: Any) -> bool:
    """Whether nothing in the program that will compute a value is on a mesh."""
    tape = value.tape
    if not isinstance(tape, tapes.Tape):
        return False
    return not any(_placed(index) for index in tape.layouts())


def _check_readable(unknown: Sequence[tuple[Path, torch.Tensor]], name: str) -> None:
    recorded = isinstance(tapes.recorder(), tapes.Tape)
    if recorded and tapes.recorder().capture is None and not tapes.is_tracing():
        return
    where = "while JAX traces" if tapes.is_tracing() else "in a step that is being captured"
    listed = ", ".join(f"{describe_path(path)} (shape {tuple(t.shape)})" for path, t in unknown)
    raise ShardingError(
        f"{name} has a handler, which needs the shardings of its arguments, and {where} {listed} "
        "has none. Mark what you pass: isoshard.torch_bridge.mark_sharding(t, mesh, spec)."
    )


def _lazy(tensor: Any) -> lazy_tensor.LazyTensor:
    return tensor


def _sharding(layout: NamedSharding | BlockLayout) -> NamedSharding:
    return layout.sharding if isinstance(layout, BlockLayout) else layout


@cached(1024)
def _layout(shape: tuple[int, ...], layout: OperandLayout, mesh: Mesh | None) -> ArrayLayout:
    if layout is None or mesh is None:
        return replicated_layout(shape, mesh)
    entries = (*entries_of(_sharding(layout).spec), *[None] * len(shape))[: len(shape)]
    names = tuple(map(axis_names, entries))
    uneven = layout if isinstance(layout, BlockLayout) else None
    padded = uneven.padded if uneven else shape
    blocks, sizes = [], []
    for axis, extent in enumerate(padded):
        count = math.prod(mesh.shape[name] for name in names[axis])
        axis_sizes = uneven.sizes[axis] if uneven else None
        blocks.append(extent // count)
        sizes.append((extent // count,) * count if axis_sizes is None else axis_sizes)
    return ArrayLayout(mesh, names, tuple(sizes), tuple(blocks), uneven is not None)
