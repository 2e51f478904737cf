"""What the notebooks draw with: where arrays lie, what devices hold, how losses fall.

Everything takes JAX arrays and torch tensors alike; what it asks is `iso.sharding_of`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import isoshard as iso

COLORS = ("#8dd3c7", "#ffed6f", "#bebada", "#fb8072", "#80b1d3", "#fdb462", "#b3de69", "#fccde5")
STYLES = ("-", "--", ":", "-.")


def borders(arrays: Mapping[str, Any], *, width: float = 2.5) -> Figure:
    """Draw arrays as rectangles, cut where their shards end; the numbers are the devices.

    Args:
        arrays: title -> array or tensor of rank 1 or 2.
        width: of one picture, in inches.

    Returns:
        The figure.
    """
    figure, row = plt.subplots(
        1, len(arrays), figsize=(width * len(arrays), width), squeeze=False, layout="constrained"
    )
    for axes, (title, array) in zip(row[0], arrays.items(), strict=True):
        _cut(axes, array)
        axes.set_title(f"{title} {list(array.shape)}\n{_spec(array)}", fontsize=9)
    plt.close(figure)  # the cell shows what it returns, once
    return figure


def curves(losses: Mapping[str, Sequence[float]], *, log: bool = True) -> Figure:
    """Draw losses over steps.

    Args:
        losses: name -> one number for each step.
        log: whether the loss has a logarithmic axis.

    Returns:
        The figure.
    """
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    for number, (name, values) in enumerate(losses.items()):
        style, wide = STYLES[number % len(STYLES)], 4 if number == 0 and len(losses) > 1 else 1.8
        axes.plot(values, style, label=name, linewidth=wide, alpha=0.5 if wide == 4 else 1)
    axes.set(xlabel="step", ylabel="loss", yscale="log" if log else "linear")
    axes.grid(alpha=0.3)
    axes.legend()
    plt.close(figure)
    return figure


def memory(trees: Mapping[str, Iterable[Any]]) -> Figure:
    """Draw how many bytes each device holds.

    Args:
        trees: name -> arrays or tensors.

    Returns:
        The figure.
    """
    held = {name: bytes_by_device(arrays) for name, arrays in trees.items()}
    figure, axes = plt.subplots(figsize=(6, 2.6), layout="constrained")
    wide = 0.8 / len(held)
    for number, (name, sizes) in enumerate(held.items()):
        places = [device + wide * (number - (len(held) - 1) / 2) for device in sizes]
        axes.bar(places, [size / 1024 for size in sizes.values()], wide, label=name)
    axes.set(xlabel="device", ylabel="KiB", xticks=sorted(next(iter(held.values()))))
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])
    axes.legend(ncols=len(held), loc="upper center")
    plt.close(figure)
    return figure


def plans(reports: Mapping[str, Any]) -> Figure:
    """Draw what plans need: memory of one device by role, and the seconds of a step.

    Args:
        reports: name -> what `iso.planner.estimate` gave. The line is what a device has; a dot is
            the step with computing and collectives side by side, where that is possible.

    Returns:
        The figure.
    """
    size = (9, 1.1 + 0.42 * len(reports))
    figure, (left, right) = plt.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    names = [*reports]
    roles = ("parameters", "optimizer", "activations")
    held = [{role: getattr(one.memory, role) / 2**30 for role in roles} for one in reports.values()]
    _stacked(left, names, held)
    left.axvline(max(one.memory.capacity for one in reports.values()) / 2**30, color="black")
    left.set(xlabel="GiB on a device")
    axes = sorted({name for one in reports.values() for name in one.time.collectives})
    spent = [
        {"computing": one.time.busy}
        | {f"over {name}": one.time.collectives.get(name, 0.0) for name in axes}
        for one in reports.values()
    ]
    _stacked(right, names, spent)
    right.plot([one.time.overlapped for one in reports.values()], names, "ko", markersize=4)
    right.set(xlabel="seconds of a step")
    left.invert_yaxis()
    plt.close(figure)
    return figure


def _stacked(axes: Axes, names: Sequence[str], rows: Sequence[Mapping[str, float]]) -> None:
    """Horizontal bars, the parts of each behind one another."""
    ends = [0.0] * len(rows)
    for part, color in zip(rows[0], COLORS, strict=False):
        wide = [row[part] for row in rows]
        axes.barh(names, wide, left=ends, label=part, color=color)
        ends = [end + more for end, more in zip(ends, wide, strict=True)]
    axes.legend(fontsize=7)


def images(arrays: Mapping[str, Any], *, width: float = 2.0) -> Figure:
    """Draw arrays as pictures, dark for -1 and bright for 1.

    Args:
        arrays: title -> numbers, of rank 2.
        width: of one picture, in inches.

    Returns:
        The figure.
    """
    size = (width * len(arrays), width * 1.1)
    figure, row = plt.subplots(1, len(arrays), figsize=size, squeeze=False, layout="constrained")
    for axes, (title, array) in zip(row[0], arrays.items(), strict=True):
        axes.imshow(np.asarray(array), cmap="magma", vmin=-1, vmax=1, interpolation="nearest")
        axes.set_title(title, fontsize=9)
        axes.axis("off")
    plt.close(figure)
    return figure


def fields(arrays: Mapping[str, Any], *, width: float = 2.0) -> Figure:
    """Draw what arrays hold, blue for negative and red for positive, and where their shards end.

    Args:
        arrays: title -> array or tensor of rank 2, in blocks of any sizes. The numbers are the
            devices; that of an empty block stands at the right end of its line.
        width: of one picture, in inches.

    Returns:
        The figure.
    """
    size = (width * len(arrays), width * 1.15)
    figure, row = plt.subplots(1, len(arrays), figsize=size, squeeze=False, layout="constrained")
    for axes, (title, array) in zip(row[0], arrays.items(), strict=True):
        values = np.asarray(iso.full(array))
        high, wide = values.shape
        limit = max(float(np.abs(values).max()), 1e-30)
        extent = (0, wide, high, 0)
        axes.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit, extent=extent)
        for ((top, bottom), (left, right)), devices in _blocks(array):
            box = Rectangle((left, top), right - left, bottom - top, fill=False, linewidth=1)
            axes.add_patch(box)
            place, side = ((right, top), "right") if top == bottom else ((left, bottom), "left")
            paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
            text = axes.text(*place, _numbers(devices), fontsize=7, ha=side, va="bottom")
            text.set_bbox(paper)
        axes.set_title(f"{title} {[high, wide]}", fontsize=9)
        axes.axis("off")
    plt.close(figure)
    return figure


def bytes_by_device(arrays: Iterable[Any]) -> dict[int, int]:
    """Add up the shards that each device holds.

    Args:
        arrays: arrays or tensors on one mesh.

    Returns:
        Device number -> bytes.
    """
    held: dict[int, int] = {}
    for array in arrays:
        for shard in iso.local_shards(array):
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    return dict(sorted(held.items()))


def _cut(axes: Axes, array: Any) -> None:
    shape = (1, *array.shape) if len(array.shape) == 1 else tuple(array.shape)
    for number, (spans, devices) in enumerate(_blocks(array)):
        (top, bottom), (left, right) = spans if len(spans) == 2 else ((0, 1), *spans)
        color = COLORS[number % len(COLORS)]
        box = Rectangle((left, top), right - left, bottom - top, facecolor=color, edgecolor="white")
        box.set_linewidth(2)
        axes.add_patch(box)
        middle = (left + right) / 2, (top + bottom) / 2
        axes.text(*middle, _numbers(devices), ha="center", va="center", fontsize=8)
    axes.set(xlim=(0, shape[1]), ylim=(shape[0], 0))
    axes.set_box_aspect(min(1.0, max(0.2, math.sqrt(shape[0] / shape[1]))))
    axes.set_xticks(sorted({0, shape[1]}))
    axes.set_yticks([] if len(array.shape) == 1 else [0, shape[0]])
    axes.tick_params(labelsize=8, length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def _blocks(array: Any) -> list[tuple[tuple[tuple[int, int], ...], list[int]]]:
    """Per block its first and last place along each axis, and the devices that hold it."""
    sharding = iso.sharding_of(array)
    blocks: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for shard in iso.local_shards(array):
        parts = zip(shard.index, array.shape, strict=True)
        spans = tuple(part.indices(size)[:2] for part, size in parts)
        blocks.setdefault(spans, []).append(_position(sharding, shard.device))
    return sorted(blocks.items())


def _spec(array: Any) -> str:
    return repr(getattr(iso.sharding_of(array), "spec", "one device"))


def _position(sharding: Any, device: Any) -> int:
    mesh = getattr(sharding, "mesh", None)
    return device.id if mesh is None else list(mesh.devices.flat).index(device)


def _numbers(devices: Sequence[int]) -> str:
    devices = sorted(devices)
    is_range = len(devices) > 2 and np.all(np.diff(devices) == 1)
    return f"{devices[0]}-{devices[-1]}" if is_range else ", ".join(map(str, devices))
