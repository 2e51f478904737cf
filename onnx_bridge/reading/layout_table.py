"""The table of `print(layout)`: stages, and the sharding and bytes of each tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from jax.sharding import NamedSharding

from isoshard.core.kit import digits, human_bytes, table

if TYPE_CHECKING:
    from .layout import ModelLayout, Stage

_HEADER = ("tensor", "kind", "shape", "dtype", "spec", "bytes/device", "stage")


def layout_table(layout: ModelLayout) -> str:
    """Write a layout as a table."""
    configuration = layout.configuration
    lines = [f"configuration {configuration.name!r} of {configuration.num_devices} devices"]
    lines += [_stage_line(layout, stage) for stage in layout.stages]
    lines += table([_HEADER, *_rows(layout)], right=5)
    lines += list(layout.notes)
    return "\n".join(lines)


def bytes_on_device(layout: ModelLayout, tensor: str, sharding: NamedSharding) -> int | None:
    """The bytes of one shard.

    Returns:
        The bytes, or None if a size or the dtype is unknown.
    """
    shape, dtype = layout.graph.shape(tensor), layout.graph.dtype(tensor)
    if shape is None or dtype is None:
        return None
    sizes = tuple(size for size in shape if isinstance(size, int))
    if len(sizes) < len(shape):
        return None
    return math.prod(sharding.shard_shape(sizes)) * dtype.itemsize


def _rows(layout: ModelLayout) -> Iterator[tuple[str, ...]]:
    graph = layout.graph
    first = {name: stage.number for stage in reversed(layout.stages) for name in stage.inputs}
    for name, sharding in layout.inputs.items():
        yield _row(layout, name, "input", sharding, first.get(name, layout.stages[0].number))
    for name, by_stage in layout.parameters.items():
        for stage_index, sharding in by_stage.items():
            yield _row(layout, name, "parameter", sharding, stage_index)
    for stage in layout.stages:
        for index in stage.nodes:
            for name in filter(None, graph.nodes[index].outputs):
                sharding = layout.sharding(index, name)
                kind = "output" if name in graph.outputs else "value"
                if sharding is not None:
                    yield _row(layout, name, kind, sharding, stage.number)


def _row(
    layout: ModelLayout, name: str, kind: str, sharding: NamedSharding, stage: int
) -> tuple[str, ...]:
    shape, dtype = layout.graph.shape(name), layout.graph.dtype(name)
    size = bytes_on_device(layout, name, sharding)
    return (
        name,
        kind,
        "?" if shape is None else str(shape),
        "?" if dtype is None else dtype.name,
        repr(sharding.spec),
        "?" if size is None else human_bytes(size),
        str(stage),
    )


def _stage_line(layout: ModelLayout, stage: Stage) -> str:
    axes = ", ".join(f"{name}={size}" for name, size in stage.mesh.shape.items())
    count = len(stage.nodes)
    nodes = f"{count} node" if count == 1 else f"{count} nodes"
    return (
        f"stage {stage.number}: {nodes} on devices {_ranges(layout.devices[stage.number])}, "
        f"mesh ({axes})"
    )


def _ranges(device_ids: tuple[int, ...]) -> str:
    """Device numbers, a run as its ends."""
    runs = digits(np.array(device_ids))
    if len(runs) == 1 and runs[0] == (len(device_ids), 1) and len(device_ids) > 1:
        return f"{device_ids[0]}-{device_ids[-1]}"
    return ", ".join(map(str, device_ids))
