"""Drawing what each device holds of an annotated ONNX model.

First the bytes per device, then the largest tensors with the block that each device has of them,
then every tensor in a line. Nothing is put on a device for it.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from isoshard.core.pictures.box_drawing import Line, colored, grid_lines, plain
from isoshard.core.runtime.formatting import human_bytes, table
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
    parts = []
    for stage in holdings(model, config, sizes):
        parts.append(_title(stage))
        parts.append(write(_totals(stage, width)))
        largest = _largest(stage)
        if largest:
            parts.append(write(_blocks(largest, stage.devices, width)))
        parts.append("\n".join(table([_HEADER, *map(_row, stage.tensors)], right=6)))
    return "\n\n".join(parts)


def _title(stage: StageHoldings) -> str:
    counts = Counter(stage.operators).most_common(6)
    words = ", ".join(f"{count} {name}" if count > 1 else name for name, count in counts)
    more = ", .." if len(set(stage.operators)) > len(counts) else ""
    count = len(stage.operators)
    return (
        f"stage {stage.number}: {count} node{'' if count == 1 else 's'} ({words}{more}) on "
        f"{len(stage.devices)} device{'' if len(stage.devices) == 1 else 's'}"
    )


def _totals(stage: StageHoldings, width: int) -> list[Line]:
    kinds = [kind for kind in ("parameter", "input", "value") if _has(stage, kind)]
    cells = []
    for kind in kinds:
        row = []
        for device in stage.devices:
            size, all_known = stage.total(device, kind)
            row.append((human_bytes(size) + ("" if all_known else " + ?"), kinds.index(kind)))
        cells.append(row)
    names = [f"device {device}" for device in stage.devices]
    return grid_lines(cells, [f"{kind}s" for kind in kinds], names, width) if kinds else []


def _has(stage: StageHoldings, kind: str) -> bool:
    return any(one.kind == kind for one in stage.tensors)


def _largest(stage: StageHoldings) -> list[DeviceTensor]:
    """The tensors that are split or take most, in the order of the table."""
    placed = [one for one in stage.tensors if one.placement is not None and one.shape]
    ranked = sorted(placed, key=lambda one: -_all_bytes(one))
    chosen = {one.name for one in ranked[:LARGEST]}
    return [one for one in placed if one.name in chosen]


def _all_bytes(one: DeviceTensor) -> int:
    counts = one.placement.counts if one.placement else ()
    return (one.block_bytes or 0) * math.prod(counts)


def _blocks(tensors: Sequence[DeviceTensor], devices: Sequence[int], width: int) -> list[Line]:
    cells = []
    for one in tensors:
        row = []
        for device in devices:
            held = one.placement.holds.get(device) if one.placement else None
            if one.placement is None or held is None:
                row.append(("", -1))
                continue
            number = 0
            for at, count in zip(held, one.placement.counts, strict=True):
                number = number * count + at
            row.append((_slice(held, one.placement.counts), number))
        cells.append(row)
    return grid_lines(
        cells, [_short(one.name) for one in tensors], [str(d) for d in devices], width
    )


def _slice(block: tuple[int, ...], counts: tuple[int, ...]) -> str:
    """A block in words: `1/2, :` is the second half of the first axis."""
    if math.prod(counts) == 1:
        return "all"
    return ", ".join(
        f"{at + 1}/{count}" if count > 1 else ":" for at, count in zip(block, counts, strict=True)
    )


def _row(one: DeviceTensor) -> tuple[str, ...]:
    shape = "?" if one.shape is None else "x".join("?" if s is None else str(s) for s in one.shape)
    blocks = copies = "?"
    if one.placement is not None:
        count = math.prod(one.placement.counts)
        blocks = "x".join(map(str, one.placement.counts)) if count > 1 else "whole"
        copies = f"{len(one.placement.holds) / count:g}"
    size = "?" if one.block_bytes is None else human_bytes(one.block_bytes)
    source = "spec" if one.said else "inferred" if one.kind == "value" else "no spec"
    return (_short(one.name), one.kind, shape or "()", one.dtype, blocks, copies, size, source)


def _short(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:18]}..{name[-20:]}"
