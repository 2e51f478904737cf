"""Pictures of layouts as rich tables, by torch_xla's names.

>>> table = visualize_sharding("{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}", use_color=False)
┌────────────┐
│            │
│ CPU [0, 1] │
│            │
├────────────┤
│            │
│ CPU [2, 3] │
│            │
└────────────┘

A box is a block of the tensor, with the devices that hold it. Columns go along the last axis that
is split (unless that is the first of several), rows along the others; torch_xla shows the first two
axes only, and fails for tensors of one. `isoshard.visualize` draws layouts with their indices.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import numpy as np
import torch

from isoshard.core.kit import COLORS, ShardingError, parse_op_sharding
from isoshard.torch_bridge.kit import sharding_spec_of


def visualize_sharding(
    sharding: str,
    use_color: bool = True,
    scale: float = 1.0,
    min_width: int = 9,
    max_width: int = 80,
) -> Any:
    """Print a layout as a table.

    Args:
        sharding: an OpSharding string; an empty one is drawn as replicated.
        use_color: a colour per block instead of lines, if the terminal has colours.
        scale: size of the boxes.
        min_width: of a box, in columns.
        max_width: of the table, in columns.

    Returns:
        The `rich.table.Table` that was printed.

    Raises:
        SpecError: the string is malformed.
        ImportError: rich is not installed.
    """
    try:
        import rich.box
        import rich.console
        import rich.padding
        import rich.table
    except ImportError:
        raise ImportError("visualize_sharding draws with rich; get it with pip install rich") from (
            None
        )
    console = rich.console.Console(width=max_width)
    color = use_color and console.color_system is not None
    table = rich.table.Table(
        show_header=False,
        show_lines=not color,
        padding=0,
        pad_edge=False,
        highlight=not color,
        box=None if color else rich.box.SQUARE,
    )
    rows = _boxes(sharding)
    lines = max(1, int(3 * scale) - 2)
    longest = max(len(label) for row in rows for label in row)
    columns = max(1, max_width // len(rows[0]) - 1)
    for _ in rows[0]:
        width = min(max(min_width, longest + 2, int(4.5 * scale)), columns)
        table.add_column(justify="center", min_width=width)
    colors = itertools.cycle(COLORS)
    for row in rows:
        cells = []
        for label in row:
            style = f"black on {next(colors)}" if color else ""
            cells.append(rich.padding.Padding(label, (lines, 0), style=style))
        table.add_row(*cells)
    console.print(table)
    return table


def visualize_tensor_sharding(t: torch.Tensor, **kwargs: Any) -> Any:
    """Print a tensor's layout as a table.

    Args:
        t: marked, or a result that was executed.
        **kwargs: as for `visualize_sharding`.

    Returns:
        The table.

    Raises:
        ShardingError: the tensor has no layout.
    """
    text = sharding_spec_of(t)
    if not text:
        raise ShardingError(
            f"a tensor of shape {tuple(t.shape)} on {t.device} has no layout to draw; mark it with "
            "xs.mark_sharding(t, mesh, spec), or execute what it is computed from with sync()"
        )
    return visualize_sharding(text, **kwargs)


def construct_v1_sharding_str(t: torch.Tensor) -> str:
    """The layout of a tensor as an OpSharding string that lists every device.

    Args:
        t: marked, or a result that was executed.

    Returns:
        The string; empty without a layout.

    >>> import isoshard.torch_bridge as xs
    >>> mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
    >>> construct_v1_sharding_str(xs.mark_sharding(torch.ones(8, 4).to("jax"), mesh, ("x", "y")))
    '{devices=[2,4]0,1,2,3,4,5,6,7}'
    """
    return sharding_spec_of(t)


def _boxes(sharding: str) -> list[list[str]]:
    """A label for each block, in rows."""
    kind = jax.default_backend().upper()
    count = len(jax.devices())
    if sharding.strip() in ("", "{replicated}"):
        return [[f"{kind} {list(range(count))}"]]
    grid = _grid(sharding)
    blocks = grid.shape[:-1]
    split = [axis for axis, count in enumerate(blocks) if count > 1]
    across = split[-1] if split and (split[-1] or len(blocks) == 1) else None
    columns = 1 if across is None else blocks[across]
    if across is not None:
        grid = np.moveaxis(grid, across, -2)
    grid = grid.reshape(math.prod(blocks) // columns, columns, -1)
    return [
        [f"{kind} {devices[0] if len(devices) == 1 else devices}" for devices in row]
        for row in grid.tolist()
    ]


def _grid(sharding: str) -> np.ndarray:
    """The device numbers of the blocks, copies last; they may be those of a part of all devices."""
    head, bracket, rest = sharding.partition("]")
    listed = rest.partition(" ")[0].rstrip("}") if bracket else ""
    ids = sorted({int(id_) for id_ in listed.split(",") if id_.strip().isdecimal()})
    if ids and ids[-1] >= len(ids):
        index_of = {id_: str(at) for at, id_ in enumerate(ids)}
        listed = ",".join(index_of[int(id_)] for id_ in listed.split(","))
        sharding = f"{head}]{listed}{rest[len(rest.partition(' ')[0].rstrip('}')) :]}"
        return np.array(ids)[parse_op_sharding(sharding).grid]
    return parse_op_sharding(sharding).grid
