"""Whether the layouts of a node's tensors go together, by its factors.

A device computes what it has all the shards for. So it holds a tile of every factor, the same in
every input; and there has to be a device for every tile. That is the proposal's "identical" axes,
its size-1 axes on all devices and its composition by intersection, in one rule. The result's block
is on the devices that computed it, and after a sum on all that took part.

>>> from .factors import FORMALISM, Factors
>>> product = Factors((("m", "k"), ("k", "n")), (("m", "n"),), FORMALISM)
>>> rows = Placement((2, 1), {0: (0, 0), 1: (0, 0), 2: (1, 0), 3: (1, 0)})
>>> columns = Placement((1, 2), {0: (0, 0), 1: (0, 1), 2: (0, 0), 3: (0, 1)})
>>> outcome = agree(product, [rows, columns])
>>> print(outcome.results[0])
2 x 2 blocks: (0, 0) on 0; (0, 1) on 1; (1, 0) on 2; (1, 1) on 3

Source: ONNX proposal 0007.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Container, Sequence

from .factors import Axes, Factors
from .placement import Placement

Tile = dict[str, int]


@dataclasses.dataclass
class Outcome:
    """What comes of a node's input layouts.

    Attributes:
        errors: rule (without the part before the dot), number of the input or None, axis, message.
        gathered: inputs and axes whose split is undone first.
        combined: factors along which partial results meet, and into how many parts.
        results: where each output is; None if that does not follow.
    """

    errors: list[tuple[str, int | None, int | None, str]]
    gathered: list[tuple[int, int]]
    combined: dict[str, int]
    results: list[Placement | None]


def agree(
    factors: Factors, inputs: Sequence[Placement | None], annotated: Container[int] = ()
) -> Outcome:
    """Compare the layouts of a node's inputs.

    Args:
        factors: of the node.
        inputs: per input, its layout; None for one that is on every device, whole.
        annotated: numbers of the inputs whose layout the node itself says. One of which it says
            nothing and that arrives whole can be cut where it is: that is told, and goes on.
    """
    outcome = Outcome([], [], {}, [None] * len(factors.outputs))
    counts, loose = _counts(factors, inputs, annotated, outcome)
    if any(rule != "unsharded-input" for rule, *_ in outcome.errors) or not any(inputs):
        return outcome
    tiles, torn = _tiles(factors, inputs, counts, loose)
    order = sorted(counts)
    distinct_tiles = {tuple(tile.get(name, 0) for name in order) for tile in tiles.values()}
    if len(distinct_tiles) < math.prod(counts.values()) or not tiles:
        outcome.errors.append(
            ("devices", None, None, _missing(factors, inputs, counts, distinct_tiles))
        )
        return outcome
    if torn:
        message = (
            f"device {torn[0]} has shards that do not go together"
            f"{f', as do {len(torn) - 1} more' if len(torn) > 1 else ''}: axes that go together "
            "have to be split the same way"
        )
        outcome.errors.append(("devices", None, None, message))
        return outcome
    outcome.combined = {
        name: counts[name] for name in sorted(factors.combined) if counts.get(name, 1) > 1
    }
    outcome.results = [
        None if axes is None else _result(axes, counts, tiles) for axes in factors.outputs
    ]
    return outcome


def _counts(
    factors: Factors,
    inputs: Sequence[Placement | None],
    annotated: Container[int],
    outcome: Outcome,
) -> tuple[dict[str, int], set[tuple[int, int]]]:
    """Into how many tiles each factor is split; (input, axis) that is not split and can be cut."""
    counts: dict[str, int] = {}
    first: dict[str, int] = {}
    unsplit: list[tuple[str, int, int]] = []
    for index, (axes, placement) in enumerate(zip(factors.inputs, inputs, strict=True)):
        for axis, name in enumerate(axes or ()):
            count = 1 if placement is None else placement.counts[axis]
            if name is None:
                if count > 1:
                    message = (
                        "its size is 1 and it is broadcast, so every device needs it whole; it is "
                        f"in {count} shards"
                    )
                    outcome.errors.append(("broadcast", index, axis, message))
            elif count > 1 and (name in factors.unsplit or factors.limits.get(name, 0) % count):
                outcome.gathered.append((index, axis))
            elif count == 1 and (placement is None or index not in annotated):
                unsplit.append((name, index, axis))
            elif counts.setdefault(name, count) != count:
                message = (
                    f"it is in {count} shards, and the axis of input {first[name]} that goes with "
                    f"it in {counts[name]}"
                )
                outcome.errors.append(("shards", index, axis, message))
            else:
                first.setdefault(name, index)
    loose = {(index, axis) for name, index, axis in unsplit if counts.get(name, 1) > 1}
    for name, index, axis in unsplit:
        if (index, axis) in loose:
            message = (
                f"it has no spec here and counts as whole, and the axis of input {first[name]} "
                f"that goes with it is in {counts[name]} shards: annotate it at this node"
            )
            outcome.errors.append(("unsharded-input", index, axis, message))
        elif inputs[index] is not None:
            counts.setdefault(name, 1)
    return counts, loose


def _tiles(
    factors: Factors,
    inputs: Sequence[Placement | None],
    counts: dict[str, int],
    loose: set[tuple[int, int]],
) -> tuple[dict[int, Tile], list[int]]:
    """By device, the tile of every factor; and devices whose shards do not match."""
    placed = [
        ([None if (index, at) in loose else name for at, name in enumerate(axes)], placement)
        for index, (axes, placement) in enumerate(zip(factors.inputs, inputs, strict=True))
        if placement and axes
    ]
    free = [
        placement
        for axes, placement in zip(factors.inputs, inputs, strict=True)
        if placement and not axes
    ]
    if not placed:  # scalars, or inputs of any sharding
        return {device: {} for placement in free for device in placement.holds}, []
    devices = frozenset.intersection(*(placement.devices for _, placement in placed))
    tiles = {}
    torn = []
    for device in sorted(devices):
        tile: Tile = {}
        for axes, placement in placed:
            block = placement.holds[device]
            blocks = {name: at for name, at in zip(axes, block, strict=True) if name in counts}
            if any(tile.setdefault(name, at) != at for name, at in blocks.items() if name):
                torn.append(device)
                break
        else:
            tiles[device] = tile
    return tiles, torn


def _result(axes: Axes, counts: dict[str, int], tiles: dict[int, Tile]) -> Placement:
    return Placement(
        tuple(counts.get(name or "", 1) for name in axes),
        {device: tuple(tile.get(name or "", 0) for name in axes) for device, tile in tiles.items()},
    )


def _missing(
    factors: Factors,
    inputs: Sequence[Placement | None],
    counts: dict[str, int],
    present: set[tuple[int, ...]],
) -> str:
    """Name shards that belong together and have no device in common."""
    order = sorted(counts)
    every = itertools.product(*(range(counts[name]) for name in order))
    lost = dict(
        zip(
            order,
            next((placement for placement in every if placement not in present), ()),
            strict=False,
        )
    )
    messages = []
    for index, (axes, placement) in enumerate(zip(factors.inputs, inputs, strict=True)):
        if placement is None or not axes:
            continue
        block = tuple(lost.get(name or "", 0) for name in axes)
        devices = sorted(
            device
            for device, at in placement.holds.items()
            if all(name not in counts or a == b for name, a, b in zip(axes, at, block, strict=True))
        )
        shown = ", ".join(map(str, devices[:8])) + (", .." if len(devices) > 8 else "")
        messages.append(f"block {block} of input {index} is on {shown or 'none'}")
    return f"no device has all that goes together: {'; '.join(messages)}"
