"""Local data: what one process has becomes its blocks of an array over many.

Each process gives the blocks that its own devices are to hold, side by side: along each axis in
the order of the whole array, without gaps. A process alone has all devices, so its data is all:

>>> from jax.sharding import PartitionSpec as P
>>> from isoshard.core.layout.mesh import make_mesh
>>> mesh = make_mesh((2, 4), ("x", "y"))
>>> from_local(np.ones((8, 4), np.float32), mesh, P("x", "y")).shape
(8, 4)

In two processes with four devices each, `P("x", None)` has each of them give half the rows:

    batch = iso.from_local(my_rows, mesh, P("x", None))     # (32, 16) here, (64, 16) altogether

and `P(None, "y")` has both give all of it, as the devices of each hold every column. Where several
processes hold the same block, each must give the same values; nobody compares them.

The global shape follows from the local one, so the processes compare theirs once for each new
layout, by a short message and not by a collective of the devices. Say `shape` to go without.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from isoshard.core.errors import ShardingError, SpecError, UnevenError, no_sharing, raise_collected
from isoshard.core.frameworks import framework_of
from isoshard.core.layout.mesh import as_mesh, describe_mesh, mesh_of
from isoshard.core.layout.spec import named_sharding
from isoshard.core.layout.tiles import Tiles
from isoshard.core.plan import Plan
from isoshard.core.processes import agree
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.bounded import Bounded

from .array_like import from_literal, is_literal
from .host_memory import check_cuts, check_narrowed, cuts_to_jax, narrowed
from .host_slices import HostSlice, positions
from .leaf_specs import NamedArray, assign, named_arrays
from .relayout import place_cuts


def from_local(
    x: Any,
    mesh: Mesh,
    spec: Any,
    *,
    shape: Any = None,
    copy: bool | None = None,
    name: str | None = None,
) -> Any:
    """Lay out data of which every process has its own blocks.

    Args:
        x: this process's blocks: a NumPy array, a jax.Array on its own devices, a tensor of a
            framework with a bridge, or a pytree of those. Numbers, lists of them, floats of 64
            bits, and what is no array, are taken as by `shard`. What of it is for other processes'
            devices (where this process's blocks make no rectangle) is not read.
        mesh: the mesh, or what `as_mesh` takes; this process must own some of its devices.
        spec: as for `shard`. A Plan needs `shape`, as it goes by global shapes.
        shape: the global shape, or a tree of them for a tree, with None for what is no array. By
            default each axis is as many
            times the local one as there are times as many blocks; the processes then compare.
        copy: None may share memory with `x` or copy, False shares or raises, True copies.
        name: of `x`, for messages.

    Returns:
        The same kind of object over the whole mesh, as `shard` gives it.

    Raises:
        ShardingError: the local shape does not fit (UnevenError: an axis does not divide), or this
            process owns no device of the mesh, or memory cannot be shared (CopyError).
        DistributedError: the processes' parts do not make one array.
        TypeError: `x` is no array, nor a tree of arrays.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> mesh = make_mesh((8,), ("x",))
        >>> from_local(np.ones((6, 2), np.float32), mesh, P("x"), name="rows")
        Traceback (most recent call last):
            ...
        isoshard.core.errors.UnevenError: rows: local shape (6, 2) does not fit P('x',): axis 0 has local size 6, and this process holds 8 of the 8 blocks along it. Give each block the same size: 8 in all, or split another axis.
    """  # noqa: E501
    mesh = as_mesh(mesh)
    if is_literal(x):
        x, copy = from_literal(x, copy, name or "array"), None
    framework = framework_of(x)
    if framework is not None:
        return framework.from_local(x, mesh, spec, shape=shape, copy=copy, name=name)
    every, structure = named_arrays(x, name)
    leaves = [leaf for leaf in every if not leaf.stays]
    modules = [leaf.name for leaf in leaves if leaf.shape is None]
    if modules:
        raise TypeError(
            f"from_local takes arrays and tensors, not modules: {', '.join(modules)}. Give a "
            "dictionary of their parameters, or lay out the module itself with iso.shard."
        )
    structs = [leaf.name for leaf in leaves if isinstance(leaf.value, jax.ShapeDtypeStruct)]
    if structs:
        raise TypeError(
            f"from_local takes data, and {', '.join(structs)} is a jax.ShapeDtypeStruct. Lay out "
            "that of the whole array with iso.shard."
        )
    _check_owner(mesh)
    arrays = structure.unflatten([None if leaf.stays else leaf for leaf in every])
    _give_shapes(leaves, jax.tree.structure(arrays), shape)
    if isinstance(spec, Plan) and shape is None:
        raise SpecError(
            f"{name or 'tree'}: a Plan goes by global shapes; say them: iso.from_local(x, mesh, "
            "plan, shape=..), a tuple for an array and a tree of tuples for a tree"
        )
    assign(every, structure, mesh, spec, name)
    faults = [_check(leaf, mesh, copy) for leaf in leaves]
    raise_collected([fault for fault in faults if fault is not None])
    layouts = {leaf.name: _layout(leaf, mesh) for leaf in leaves}
    if shape is None:
        _compare(leaves, layouts)
    for leaf in leaves:
        leaf.value = _place(leaf, *layouts[leaf.name], mesh, copy)
    return jax.tree.unflatten(structure, [leaf.value for leaf in every])


def _give_shapes(leaves: Sequence[NamedArray], structure: Any, shape: Any) -> None:
    """Note the global shape of each leaf, if it is said."""
    if shape is None:
        return
    given = [shape] if _is_shape(shape) else jax.tree.leaves(shape, is_leaf=_is_shape)
    fits = jax.tree.structure(shape, is_leaf=_is_shape) == structure or len(leaves) == 1
    if not fits or not all(map(_is_shape, given)) or len(given) != len(leaves):
        raise ShardingError(
            f"shape={shape!r} is not the global shape of each of "
            f"{', '.join(leaf.name for leaf in leaves) or 'no leaves'}: give a tuple of sizes for "
            "an array, and a tree of tuples with the same structure for a tree"
        )
    for leaf, whole in zip(leaves, given, strict=True):
        leaf.whole = tuple(map(int, whole))


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, tuple | list) and all(isinstance(n, int | np.integer) for n in shape)


def _check_owner(mesh: Mesh) -> None:
    owners = sorted({device.process_index for device in mesh.devices.flat})
    if jax.process_index() not in owners:
        raise ShardingError(
            f"process {jax.process_index()} owns no device of the mesh {describe_mesh(mesh)}, "
            f"whose devices belong to {_processes(owners)}, so it has no part to give; call "
            "from_local there only, or iso.shard with what every process has whole"
        )


def _check(leaf: NamedArray, mesh: Mesh, copy: bool | None) -> ShardingError | None:
    """Look whether the leaf can be placed; the fault, or None."""
    try:
        sharding, _ = _layout(leaf, mesh)
        value = leaf.value
        if isinstance(value, np.ndarray):
            if check_narrowed(value, copy, leaf.name):
                return None
            check_cuts(value, sharding, _cuts(sharding, value.shape), copy=copy, name=leaf.name)
        elif isinstance(value, jax.Array):
            _check_array(value, sharding, leaf.name, copy)
    except ShardingError as error:
        return error
    return None


def _check_array(x: jax.Array, sharding: NamedSharding, name: str, copy: bool | None) -> None:
    if isinstance(x, Tracer):
        raise ShardingError(
            f"{name}: a traced value belongs to all processes alike; constrain it with "
            "iso.shard(x, mesh, spec), or call from_local outside jit"
        )
    if not x.is_fully_addressable:
        raise ShardingError(
            f"{name}: an array of shape {x.shape} lies on devices of several processes already; "
            "lay it out with iso.reshard(x, mesh, spec)"
        )
    if copy is False and x.sharding.device_set != sharding.addressable_devices:
        raise no_sharing(name, f"its data must move from {x.sharding} to {sharding}")


def _layout(leaf: NamedArray, mesh: Mesh) -> tuple[NamedSharding, tuple[int, ...]]:
    """The sharding and the global shape of a leaf."""
    local = tuple(leaf.value.shape)
    if leaf.whole is not None and len(leaf.whole) != len(local):
        raise ShardingError(
            f"{leaf.name}: local shape {local} is of another rank than the global {leaf.whole}"
        )
    sharding = named_sharding(leaf.spec, mesh, len(local), shape=leaf.whole, name=leaf.name)
    counts, held = blocks_here(sharding, len(local))
    if leaf.whole is None:
        wrong = [
            f"axis {axis} has local size {size}, and this process holds {len(mine)} of the "
            f"{count} blocks along it"
            for axis, (size, count, mine) in enumerate(zip(local, counts, held, strict=True))
            if size % len(mine)
        ]
        if wrong:
            up = [-(-size // len(mine)) * len(mine) for size, mine in zip(local, held, strict=True)]
            need = ", ".join(str(n) for n, size in zip(up, local, strict=True) if n != size)
            raise UnevenError(
                f"{leaf.name}: local shape {local} does not fit {sharding.spec}: "
                f"{'; '.join(wrong)}. Give each block the same size: {need} in all, or split "
                "another axis."
            )
        return sharding, whole_shape(local, sharding)
    wanted = tuple(
        size // count * len(mine)
        for size, count, mine in zip(leaf.whole, counts, held, strict=True)
    )
    if wanted != local:
        raise ShardingError(
            f"{leaf.name}: local shape {local} does not fit: of the global shape {leaf.whole} by "
            f"{sharding.spec}, process {jax.process_index()} holds {wanted}, which is "
            f"{_part(leaf.whole, counts, held)}. Give that part; what every process has whole is "
            "laid out with iso.shard(x, mesh, spec)."
        )
    return sharding, leaf.whole


def _part(shape: Sequence[int], counts: Sequence[int], held: Sequence[Sequence[int]]) -> str:
    """The blocks of a process, in words: `[0:4 and 8:12, 0:8]`."""
    axes = []
    for size, count, mine in zip(shape, counts, held, strict=True):
        step = size // count
        runs: list[list[int]] = []
        for block in mine:
            if runs and runs[-1][1] == block * step:
                runs[-1][1] += step
            else:
                runs.append([block * step, (block + 1) * step])
        axes.append(" and ".join(f"{start}:{stop}" for start, stop in runs))
    return f"[{', '.join(axes)}]"


def _compare(
    leaves: Sequence[NamedArray], layouts: dict[str, tuple[NamedSharding, tuple[int, ...]]]
) -> None:
    """Have the processes say which arrays they are making parts of, if that is new."""
    new = {}
    for leaf in leaves:
        sharding, shape = layouts[leaf.name]
        key = (shape, str(leaf.dtype), sharding)
        if not sharding.is_fully_addressable and key not in _agreed_by(sharding):
            new[key] = f"{leaf.name}: global {shape} {leaf.dtype} by {_told(sharding)}"
    if new:
        mesh = next(iter(new))[2].mesh
        agree("local data of one array", [*new.values()], owners_of(mesh))
        for key in new:
            _agreed_by(key[2])[key] = True


@functools.lru_cache(maxsize=256)
def owners_of(mesh: Mesh) -> tuple[int, ...]:
    """The processes that own devices of a mesh, ascending. Cached."""
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def _agreed_by(sharding: NamedSharding) -> Bounded[Any, bool]:
    """What the processes of a mesh agreed on, the newest; all of them forget the same."""
    return _agreed.setdefault(owners_of(mesh_of(sharding)), Bounded(4096))


_agreed: dict[tuple[int, ...], Bounded[Any, bool]] = {}


@functools.lru_cache(maxsize=256)
def _told(sharding: NamedSharding) -> str:
    """A layout so that it reads alike in all processes only if it is the same."""
    mesh = mesh_of(sharding)
    owners = [device.process_index for device in mesh.devices.flat]
    return f"{sharding.spec} on {describe_mesh(mesh)} of processes {owners}"


def _place(
    leaf: NamedArray, sharding: NamedSharding, shape: tuple[int, ...], mesh: Mesh, copy: bool | None
) -> Any:
    value = leaf.value
    if leaf.framework is not None:
        return leaf.framework.from_local(
            value, mesh, leaf.spec, shape=shape, copy=copy, name=leaf.name
        )
    cuts = _cuts(sharding, value.shape)
    if isinstance(value, np.ndarray):
        made = narrowed(value, copy, leaf.name)
        copy = copy if made is value else None
        return cuts_to_jax(made, sharding, shape, cuts, copy=copy, name=leaf.name)
    return place_cuts(value, sharding, shape, cuts, copy=copy)


@functools.lru_cache(maxsize=4096)
def _cuts(sharding: NamedSharding, local: tuple[int, ...]) -> tuple[HostSlice, ...]:
    """The slices of local data that this process's devices are to hold."""
    _, held = blocks_here(sharding, len(local))
    steps = [size // len(mine) for size, mine in zip(local, held, strict=True)]
    block_of = Tiles.from_sharding(sharding, len(local)).block_of()
    cuts = []
    for device, number in positions(sharding).items():
        if device.process_index != jax.process_index():
            continue
        block = block_of[number]
        at = [mine.index(b) for mine, b in zip(held, block, strict=True)]
        index = tuple(slice(a * n, (a + 1) * n) for a, n in zip(at, steps, strict=True))
        start = tuple(b * n for b, n in zip(block, steps, strict=True))
        cuts.append(HostSlice(device, number, start, index))
    return tuple(cuts)


@functools.lru_cache(maxsize=4096)
def blocks_here(
    sharding: NamedSharding, ndim: int
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Count the blocks of a layout.

    Args:
        sharding: the layout.
        ndim: rank of the array.

    Returns:
        Along each axis the number of blocks, and which of them this process's devices hold.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> blocks_here(named_sharding(P("x"), make_mesh((2, 4), ("x", "y")), 2), 2)
        ((2, 1), ((0, 1), (0,)))
    """
    tiles = Tiles.from_sharding(sharding, ndim)
    block_of = tiles.block_of()
    mine = [
        block_of[number]
        for device, number in positions(sharding).items()
        if device.process_index == jax.process_index()
    ]
    held = tuple(tuple(sorted({block[axis] for block in mine})) for axis in range(ndim))
    return tiles.blocks, held


def whole_shape(local: Sequence[int], sharding: NamedSharding) -> tuple[int, ...]:
    """The global shape, if all blocks are as large as those of this process.

    Args:
        local: shape of what this process gives.
        sharding: the layout; it divides `local` by the blocks that this process holds.

    Returns:
        The shape of the whole.
    """
    counts, held = blocks_here(sharding, len(local))
    sizes = zip(local, counts, held, strict=True)
    return tuple(size // max(1, len(mine)) * count for size, count, mine in sizes)


def _processes(numbers: Sequence[int]) -> str:
    return f"process{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
