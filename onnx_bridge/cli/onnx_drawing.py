"""Drawings of each device's shards of an annotated ONNX model.

First the bytes per device, then the largest tensors with the block that each device has of them,
then every tensor in a line. Nothing is put on a device for it.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from isoshard.core.kit import Line, colored, grid_lines, human_bytes, plain, table
from isoshard.onnx_bridge.checking.holdings import DeviceTensor, StageHoldings, holdings

LARGEST = 12
_HEADER = ("tensor", "kind", "shape", "dtype", "blocks", "copies", "bytes/device", "from")


def draw(
    model: Any | str | os.PathLike[str] | bytes,
    config: str | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    width: int = 100,
    color: bool = False,
) -> str:
    """Draw the layout of a model, stage by stage."""
    write = colored if color else plain
    sections = []
    for stage in holdings(model, config, sizes):
        sections.append(_title(stage))
        sections.append(write(_totals(stage, width)))
        largest = _largest(stage)
        if largest:
            sections.append(write(_blocks(largest, stage.devices, width)))
        sections.append("\n".join(table([_HEADER, *map(_row, stage.tensors)], right=6)))
    return "\n\n".join(sections)


def _title(stage: StageHoldings) -> str:
    counts = Counter(stage.operators).most_common(6)
    devices_text = ", ".join(f"{count} {name}" if count > 1 else name for name, count in counts)
    more = ", .." if len(set(stage.operators)) > len(counts) else ""
    count = len(stage.operators)
    return (
        f"stage {stage.stage}: {count} node{'' if count == 1 else 's'} ({devices_text}{more}) on "
        f"{len(stage.devices)} device{'' if len(stage.devices) == 1 else 's'}"
    )


def _totals(stage: StageHoldings, width: int) -> list[Line]:
    kinds = [kind for kind in ("parameter", "input", "value") if _has(stage, kind)]
    cells = []
    for kind in kinds:
        row = []
        for device in stage.devices:
            size, is_complete = stage.total(device, kind)
            row.append((human_bytes(size) + ("" if is_complete else " + ?"), kinds.index(kind)))
        cells.append(row)
    names = [f"device {device}" for device in stage.devices]
    return grid_lines(cells, [f"{kind}s" for kind in kinds], names, width) if kinds else []


def _has(stage: StageHoldings, kind: str) -> bool:
    return any(tensor.kind == kind for tensor in stage.tensors)


def _largest(stage: StageHoldings) -> list[DeviceTensor]:
    """The tensors that are split or take most, in the order of the table."""
    placed = [tensor for tensor in stage.tensors if tensor.placement is not None and tensor.shape]
    ranked = sorted(placed, key=lambda tensor: -_all_bytes(tensor))
    chosen = {tensor.name for tensor in ranked[:LARGEST]}
    return [tensor for tensor in placed if tensor.name in chosen]


def _all_bytes(tensor: DeviceTensor) -> int:
    counts = tensor.placement.counts if tensor.placement else ()
    return (tensor.block_bytes or 0) * math.prod(counts)


def _blocks(tensors: Sequence[DeviceTensor], devices: Sequence[int], width: int) -> list[Line]:
    cells = []
    for tensor in tensors:
        row = []
        for device in devices:
            block = tensor.placement.holds.get(device) if tensor.placement else None
            if tensor.placement is None or block is None:
                row.append(("", -1))
                continue
            count_so_far = 0
            for at, count in zip(block, tensor.placement.counts, strict=True):
                count_so_far = count_so_far * count + at
            row.append((_slice(block, tensor.placement.counts), count_so_far))
        cells.append(row)
    return grid_lines(
        cells, [_short(tensor.name) for tensor in tensors], [str(d) for d in devices], width
    )


def _slice(block: tuple[int, ...], counts: tuple[int, ...]) -> str:
    """A block in words: `1/2, :` is the second half of the first axis."""
    if math.prod(counts) == 1:
        return "all"
    return ", ".join(
        f"{at + 1}/{count}" if count > 1 else ":" for at, count in zip(block, counts, strict=True)
    )


def _row(tensor: DeviceTensor) -> tuple[str, ...]:
    shape = (
        "?"
        if tensor.shape is None
        else "x".join("?" if s is None else str(s) for s in tensor.shape)
    )
    blocks = copies = "?"
    if tensor.placement is not None:
        count = math.prod(tensor.placement.counts)
        blocks = "x".join(map(str, tensor.placement.counts)) if count > 1 else "whole"
        copies = f"{len(tensor.placement.holds) / count:g}"
    size = "?" if tensor.block_bytes is None else human_bytes(tensor.block_bytes)
    source = "spec" if tensor.annotated else "inferred" if tensor.kind == "value" else "no spec"
    return (
        _short(tensor.name),
        tensor.kind,
        shape or "()",
        tensor.dtype,
        blocks,
        copies,
        size,
        source,
    )


def _short(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:18]}..{name[-20:]}"
