"""Visualize: which device holds which part, as a picture of boxes.

>>> from isoshard.core.layout.mesh import make_mesh
>>> mesh = make_mesh((2, 4), ("x", "y"))
>>> print(visualize(P(None, "x"), shape=(8, 16), mesh=mesh))
[8, 16]  P(None, 'x')  mesh (x=2, y=4)
2 blocks of [8, 8], each on 4 devices
       0:8    8:16
    ┌───────┬───────┐
0:8 │  0-3  │  4-7  │
    └───────┴───────┘

A box is a block of the tensor, labelled with its indices; the numbers in it are the devices that
hold it, as positions in the flattened mesh (`mesh.devices.flat`), not `Device.id`.

Of a tensor of rank 3 or more, the first two sharded axes are drawn, as rows (`↓`) and columns
(`→`), once per block along the other sharded axes.

>>> print(visualize(P("x", None, "y"), shape=(2, 3, 8), mesh=make_mesh((2, 2), ("x", "y"))))
[2, 3, 8]  P('x', None, 'y')  mesh (x=2, y=2)
4 blocks of [1, 3, 4], each on 1 device
[↓, :, →]
       0:4     4:8
    ┌───────┬───────┐
0:1 │   0   │   1   │
    ├───────┼───────┤
1:2 │   2   │   3   │
    └───────┴───────┘

The title names the type of each mesh axis that is not Auto. Where a sum over a mesh axis is still
to be taken, the devices that hold its terms stand behind a `Σ`:

>>> open_sum = P("x", None, unreduced={"y"})
>>> print(visualize(open_sum, shape=(2, 3), mesh=jax.make_mesh((2, 4), ("x", "y"))))
[2, 3]  P('x', unreduced={'y'})  mesh (x=2 Explicit, y=4 Explicit)
2 blocks of [1, 3], each on 4 devices
Σ: the sum over y is still to be taken, of a term each
       0:3
    ┌───────┐
0:1 │ Σ0-3  │
    ├───────┤
1:2 │ Σ4-7  │
    └───────┘

Large pictures are abbreviated with `…`: to the width, 16 rows and 8 slices.

Any process of many can draw the complete picture, without communication; a line above the boxes
lists its own devices.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import SpecError
from isoshard.core.frameworks import framework_of
from isoshard.core.layout.axis_types import AnyMesh
from isoshard.core.layout.leaf_paths import path_name
from isoshard.core.layout.mesh import as_mesh
from isoshard.core.layout.op_sharding import parse_op_sharding
from isoshard.core.layout.partial_sums import reduction, stored, unreduced
from isoshard.core.layout.spec import named_sharding
from isoshard.core.layout.spec_entries import axis_names, entries_of
from isoshard.core.layout.tiles import Tiles
from isoshard.core.layout.uneven import Sizes, UnevenArray, is_uneven
from isoshard.core.layout.virtual_devices import Device
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.transfer.device_put import sharding_of

from .box_drawing import Cell
from .device_bytes import device_bytes
from .device_labels import Terms, device_ranges, terms_of, terms_text
from .layout_drawing import Boxes, LayoutDrawing
from .layout_picture import LayoutPicture

MAX_SLICES = 8
Bounds = list[list[int]]  # per axis, where its blocks begin, and where the last one ends


def visualize(
    x: Any,
    *,
    shape: Sequence[int] | None = None,
    mesh: Mesh | None = None,
    use_rich: bool = False,
    width: int = 80,
) -> LayoutPicture:
    """Draw a layout.

    Args:
        x: what to draw: an array or tensor, a tree of them or a module (one picture per leaf), a
            NamedSharding, a `jax.ShapeDtypeStruct` that has one, an OpSharding string, or a spec in
            any spelling together with `mesh`.
        shape: global shape, where `x` has none. Without it the boxes bear no indices.
        mesh: the mesh of a spec; it may be abstract.
        use_rich: put escape codes that colour the blocks on a terminal into the text.
        width: columns to fit into.

    Returns:
        The picture: a text, lines joined by newlines. A notebook shows it as HTML, with the bytes
        that devices hold; `.show()` prints it, on a terminal in colours.

    Raises:
        SpecError: a spec without `mesh`, or one that does not fit.
        ShardingError: the layout does not fit `shape`, or is on no mesh.

    Example:
        >>> print(visualize("{devices=[2,1]0,1}", shape=(4, 2)))
        [4, 2]  {devices=[2,1]0,1}  2 devices
        2 blocks of [2, 2], each on 1 device
               0:2
            ┌───────┐
        0:2 │   0   │
            ├───────┤
        2:4 │   1   │
            └───────┘
    """
    shape = None if shape is None else tuple(shape)
    mesh = None if mesh is None else as_mesh(mesh, abstract=True)
    return LayoutPicture(list(_drawings(x, shape, mesh)), width, colours=use_rich)


def _drawings(x: Any, shape: tuple[int, ...] | None, mesh: Mesh | None) -> Iterator[LayoutDrawing]:
    if isinstance(x, jax.ShapeDtypeStruct):
        yield _of_sharding(_promised(x), x.shape, x.dtype)
    elif isinstance(x, str) and x.lstrip().startswith("{"):
        tiles, where = _read_op_sharding(x, shape, mesh)
        yield _drawing(x, tiles, where, shape, devices=None)
    elif isinstance(x, Sharding):
        yield _of_sharding(x, shape)
    elif isinstance(x, jax.Array):
        layout = sharding_of(x) if isinstance(x, Tracer) else x.sharding
        yield _of_sharding(layout, x.shape, x.dtype)
    elif isinstance(x, UnevenArray):
        yield _of_sharding(x.sharding, x.shape, x.dtype, x.sizes)
    elif mesh is not None:
        sharding = named_sharding(x, mesh, _rank(x, shape), shape=shape, sums=True)
        yield _of_sharding(sharding, shape)
    elif isinstance(x, P | str | None):
        raise SpecError(
            f"the spec {x!r} alone names no devices; give its mesh: visualize(.., mesh=..)"
        )
    else:
        yield from _of_object(x)


def _of_object(x: Any) -> Iterator[LayoutDrawing]:
    """Drawings of a framework's tensor or module, or of the leaves of a tree."""
    framework = framework_of(x)
    if framework is None:
        for name, leaf in _leaves(x):
            yield from (
                dataclasses.replace(drawing, name=name) for drawing in _drawings(leaf, None, None)
            )
        return
    layout = framework.sharding_of(x)
    if isinstance(layout, Sharding):
        yield _of_sharding(layout, tuple(x.shape), x.dtype, framework.block_sizes(x))
        return
    leaves = framework.named_arrays(x)
    for name, sharding in layout.items():
        drawing = _of_sharding(sharding)
        if name in leaves:
            array = leaves[name]
            sizes = framework.block_sizes(array)
            drawing = _of_sharding(sharding, tuple(array.shape), array.dtype, sizes)
        yield dataclasses.replace(drawing, name=name)


def _leaves(x: Any) -> list[tuple[str, Any]]:
    with_paths = jax.tree.leaves_with_path(x, is_leaf=is_uneven)
    leaves = [(path_name(path), leaf) for path, leaf in with_paths]
    if any(leaf is x for _, leaf in leaves):
        raise TypeError(
            f"cannot draw a {type(x).__name__}; give an array, a tensor or a tree of them, sharded "
            "by isoshard.shard, a NamedSharding, an OpSharding string, or a spec and mesh=.."
        )
    return leaves


def _of_sharding(
    sharding: Sharding,
    shape: tuple[int, ...] | None = None,
    dtype: Any = None,
    sizes: Sizes | None = None,
) -> LayoutDrawing:
    spec = getattr(sharding, "spec", P())
    ndim = max(len(spec), 0 if shape is None else len(shape))
    tiles = Tiles.from_sharding(stored(sharding), ndim)
    if not isinstance(sharding, NamedSharding):
        device = next(iter(sharding.device_set))
        return _drawing("", tiles, _device_line(device), shape, dtype, devices=(device.id,))
    mesh = sharding.mesh
    notes, terms = _local_devices(mesh), None
    if names := unreduced(sharding):
        reduced_by = {"sum": "sum", "max": "maximum", "min": "minimum"}[reduction(sharding)]
        over = ", ".join(names)
        notes.append(f"Σ: the {reduced_by} over {over} is still to be taken, of a term each")
        terms = terms_of(mesh, names)
    ids = tuple(device.id for device in mesh.devices.flat) if isinstance(mesh, Mesh) else None
    where = f"mesh ({_axes(mesh)})"
    title = repr(spec).replace(", unreduced_kind=sum", "")  # JAX 0.12 writes the usual kind, too
    drawing = _drawing(title, tiles, where, shape, dtype, notes, sizes, terms, devices=ids)
    if drawing.device_bytes is None:
        return drawing
    split = [name for entry in entries_of(spec) for name in axis_names(entry)]
    received = [(name, drawing.device_bytes.most * (mesh.shape[name] - 1)) for name in split]
    return dataclasses.replace(drawing, received=tuple(received))


def _promised(x: jax.ShapeDtypeStruct) -> Sharding:
    if x.sharding is None:
        raise SpecError(
            f"{x} has no sharding; give it one: jax.ShapeDtypeStruct(shape, dtype, sharding=..)"
        )
    return x.sharding


def _axes(mesh: AnyMesh) -> str:
    """The axes of a mesh, and of what type they are, if that is not Auto."""
    kinds = ["" if kind == AxisType.Auto else f" {kind.name}" for kind in mesh.axis_types]
    axes = zip(mesh.shape.items(), kinds, strict=True)
    return ", ".join(f"{name}={size}{kind}" for (name, size), kind in axes)


def _device_line(device: Device) -> str:
    is_local = device.process_index == jax.process_index()
    return f"on {device}{'' if is_local else f' of process {device.process_index}'}"


def _local_devices(mesh: AnyMesh) -> list[str]:
    """Which of a mesh's devices this process has; nothing if all, or they are not known."""
    if not isinstance(mesh, Mesh):
        return []
    owners = [device.process_index for device in mesh.devices.flat]
    me = jax.process_index()
    if set(owners) == {me}:
        return []
    local = [index for index, owner in enumerate(owners) if owner == me]
    return [
        f"process {me} has {f'devices {device_ranges(local)}' if local else 'none of the devices'}"
    ]


def _read_op_sharding(
    text: str, shape: tuple[int, ...] | None, mesh: Mesh | None
) -> tuple[Tiles, str]:
    names_devices = "devices=" in text
    if not names_devices and (shape is None or mesh is None):
        raise SpecError(
            f"{text!r} names neither rank nor devices; give visualize(.., shape=.., mesh=..)"
        )
    ndim = None if shape is None else len(shape)
    tiles = parse_op_sharding(text, ndim, num_devices=None if mesh is None else mesh.size)
    return tiles, f"{tiles.num_devices} devices"


def _drawing(
    spec: str,
    tiles: Tiles,
    where: str,
    shape: tuple[int, ...] | None,
    dtype: Any = None,
    notes: Sequence[str] = (),
    sizes: Sizes | None = None,
    terms: Terms | None = None,
    *,
    devices: tuple[int, ...] | None,
) -> LayoutDrawing:
    bounds = None if shape is None else _bounds(tiles, shape, sizes)
    name = "" if dtype is None else str(dtype).removeprefix("torch.")
    subject = "" if shape is None else f"{name}{list(shape)}"
    rows, columns = _drawn_axes(tiles)
    others = [axis for axis in range(tiles.ndim) if axis not in (rows, columns)]
    slices = list(itertools.product(*(range(tiles.blocks[axis]) for axis in others)))
    panels = []
    for at in slices[:MAX_SLICES]:
        fixed = dict(zip(others, at, strict=True))
        heading = _heading(tiles, bounds, fixed, rows, columns) if others else ""
        panels.append(_boxes(heading, tiles, bounds, fixed, rows, columns, terms))
    stored = None
    if bounds is not None and dtype is not None:
        stored = device_bytes(tiles, bounds, dtype.itemsize)
    return LayoutDrawing(
        tuple(text for text in (subject, spec, where) if text), _blocks(tiles, shape, sizes),
        tuple(notes), tuple(panels), len(slices) - len(panels), stored, (), devices,
    )  # fmt: skip


def _bounds(tiles: Tiles, shape: tuple[int, ...], sizes: Sizes | None) -> Bounds:
    """Where the blocks of each axis begin and end.

    Raises:
        ShardingError: the shape is of another rank, or does not split.
    """
    if sizes is None:
        tiles.slices(shape)
        sizes = (None,) * len(shape)
    blocks = [
        (extent // count,) * count if size is None else size
        for extent, count, size in zip(shape, tiles.blocks, sizes, strict=True)
    ]
    return [list(itertools.accumulate(size, initial=0)) for size in blocks]


def _blocks(tiles: Tiles, shape: tuple[int, ...] | None, sizes: Sizes | None) -> str:
    """How many blocks there are, of what size, and on how many devices each is."""
    count, copies = math.prod(tiles.blocks), tiles.replicas
    blocks = "1 block" if count == 1 else f"{count} blocks"
    if shape is not None:
        block_sizes = sizes or (None,) * len(shape)
        axes = zip(shape, tiles.blocks, block_sizes, strict=True)
        each = [extent // n if size is None else list(size) for extent, n, size in axes]
        blocks += f" of {each}"
    devices = "1 device" if copies == 1 else f"{copies} devices"
    return f"{blocks}, {'' if count == 1 else 'each '}on {devices}"


def _drawn_axes(tiles: Tiles) -> tuple[int | None, int | None]:
    """The tensor axes shown as rows and columns: the first two sharded, else the first ones."""
    if tiles.ndim < 2:
        return None, (0 if tiles.ndim else None)
    by_need = sorted(range(tiles.ndim), key=lambda axis: tiles.blocks[axis] == 1)
    rows, columns = sorted(by_need[:2])
    return rows, columns


def _boxes(
    heading: str,
    tiles: Tiles,
    bounds: Bounds | None,
    fixed: dict[int, int],
    rows: int | None,
    columns: int | None,
    terms: Terms | None,
) -> Boxes:
    def cell(row: int, column: int) -> Cell:
        indices = {**fixed, rows: row, columns: column}
        block = tuple(indices[axis] for axis in range(tiles.ndim))
        devices = tiles.grid[block].tolist()
        text = device_ranges(devices) if terms is None else terms_text(devices, terms)
        return text, _count_to(block, tiles.blocks)

    across = range(1 if columns is None else tiles.blocks[columns])
    down = range(1 if rows is None else tiles.blocks[rows])
    cells = [[cell(row, column) for column in across] for row in down]
    return Boxes(
        heading,
        cells,
        [_range(bounds, rows, row) for row in down],
        [_range(bounds, columns, column) for column in across],
    )


def _heading(
    tiles: Tiles,
    bounds: Bounds | None,
    fixed: dict[int, int],
    rows: int | None,
    columns: int | None,
) -> str:
    def item(axis: int) -> str:
        if axis in (rows, columns):
            return "↓" if axis == rows else "→"
        if tiles.blocks[axis] == 1:
            return ":"
        at = fixed[axis]
        return _range(bounds, axis, at) or f"{at + 1} of {tiles.blocks[axis]}"

    return f"[{', '.join(map(item, range(tiles.ndim)))}]"


def _range(bounds: Bounds | None, axis: int | None, at: int) -> str:
    """The indices of block number `at` along an axis, e.g. `4:8`."""
    if bounds is None or axis is None:
        return ""
    return f"{bounds[axis][at]}:{bounds[axis][at + 1]}"


def _count_to(block: tuple[int, ...], blocks: tuple[int, ...]) -> int:
    total = 0
    for at, count in zip(block, blocks, strict=True):
        total = total * count + at
    return total


def _rank(spec: Any, shape: tuple[int, ...] | None) -> int:
    if shape is not None:
        return len(shape)
    return len(spec) if isinstance(spec, tuple | list | P) else 0
