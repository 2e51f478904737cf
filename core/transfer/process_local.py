"""Process-local data: each process passes its own blocks of a global array.

Each process passes the blocks of its own devices, concatenated along each axis in the order of the
global array, without gaps. A single process has all devices, so its data is the global array:

>>> from jax.sharding import PartitionSpec as P
>>> from isoshard.core.layout.mesh import make_mesh
>>> mesh = make_mesh((2, 4), ("x", "y"))
>>> from_local(np.ones((8, 4), np.float32), mesh, P("x", "y")).shape
(8, 4)

In two processes with four devices each, under `P("x", None)` each passes half of the rows:

    batch = iso.from_local(my_rows, mesh, P("x", None))     # local (32, 16), global (64, 16)

and under `P(None, "y")` both pass all of it, as each has devices for every column. Where several
processes have the same block, each must pass the same values; this is not checked.

The global shape is inferred from the local shape, so the processes compare theirs once for each new
sharding, by a short message and not by a collective of the devices. With `shape` they do not.
"""

from __future__ import annotations

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
from isoshard.core.processes import assert_equal
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.caches import Bounded, cached

from .array_like import from_literal, is_literal
from .host_memory import check_narrowed, check_slices, narrowed, slices_to_jax
from .host_slices import HostSlice, positions
from .leaf_specs import NamedArray, named_arrays, set_specs
from .reshard import put_slices


def from_local(
    x: Any,
    mesh: Mesh,
    spec: Any,
    *,
    shape: Any = None,
    copy: bool | None = None,
    name: str | None = None,
) -> Any:
    """Create a global array from each process's own blocks.

    Args:
        x: this process's blocks: a NumPy array, a jax.Array on its own devices, a tensor of a
            framework with a bridge, or a pytree of those. Numbers, lists of them, floats of 64
            bits, and leaves that are no arrays, are treated as by `shard`. Where this process's
            blocks make no rectangle, the elements of other processes' blocks are not read.
        mesh: the mesh, or what `as_mesh` takes; this process must own some of its devices.
        spec: as for `shard`. A Plan needs `shape`, as it goes by global shapes.
        shape: the global shape, or a tree of them for a tree, with None for leaves that are no
            array. By default inferred, axis by axis, from the number of blocks that are local; the
            processes then compare it.
        copy: None may share memory with `x` or copy, False shares or raises, True copies.
        name: of `x`, for messages.

    Returns:
        The same kind of object over all of the mesh, as from `shard`.

    Raises:
        ShardingError: the local shape does not fit (UnevenError: an axis does not divide), or this
            process owns no device of the mesh, or memory cannot be shared (CopyError).
        DistributedError: the processes' data does not make one array.
        TypeError: `x` is no array, nor a tree of arrays.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> mesh = make_mesh((8,), ("x",))
        >>> from_local(np.ones((6, 2), np.float32), mesh, P("x"), name="rows")
        Traceback (most recent call last):
            ...
        isoshard.core.errors.UnevenError: rows: local shape (6, 2) does not fit P('x',): axis 0 has local size 6, and this process has 8 of the 8 blocks over it. Give each block the same size: 8 in all, or split another axis.
    """  # noqa: E501
    mesh = as_mesh(mesh)
    if is_literal(x):
        x, copy = from_literal(x, copy, name or "array"), None
    framework = framework_of(x)
    if framework is not None:
        return framework.from_local(x, mesh, spec, shape=shape, copy=copy, name=name)
    all_leaves, structure = named_arrays(x, name)
    leaves = [leaf for leaf in all_leaves if not leaf.is_passthrough]
    modules = [leaf.name for leaf in leaves if leaf.shape is None]
    if modules:
        raise TypeError(
            f"from_local takes arrays and tensors, not modules: {', '.join(modules)}. Give a "
            "dictionary of their parameters, or shard the module itself with iso.shard."
        )
    structs = [leaf.name for leaf in leaves if isinstance(leaf.value, jax.ShapeDtypeStruct)]
    if structs:
        raise TypeError(
            f"from_local takes data, and {', '.join(structs)} is a jax.ShapeDtypeStruct. Shard "
            "that of the global array with iso.shard."
        )
    _check_owner(mesh)
    arrays = structure.unflatten([None if leaf.is_passthrough else leaf for leaf in all_leaves])
    _set_global_shapes(leaves, jax.tree.structure(arrays), shape)
    if isinstance(spec, Plan) and shape is None:
        raise SpecError(
            f"{name or 'tree'}: a Plan goes by global shapes; pass them: iso.from_local(x, mesh, "
            "plan, shape=..), a tuple for an array and a tree of tuples for a tree"
        )
    set_specs(all_leaves, structure, mesh, spec, name)
    errors = [_check(leaf, mesh, copy) for leaf in leaves]
    raise_collected([error for error in errors if error is not None])
    layouts = {leaf.name: _layout(leaf, mesh) for leaf in leaves}
    if shape is None:
        _compare(leaves, layouts)
    for leaf in leaves:
        leaf.value = _put(leaf, *layouts[leaf.name], mesh, copy)
    return jax.tree.unflatten(structure, [leaf.value for leaf in all_leaves])


def _set_global_shapes(leaves: Sequence[NamedArray], structure: Any, shape: Any) -> None:
    """Set the global shape of each leaf, if it is specified."""
    if shape is None:
        return
    shapes = [shape] if _is_shape(shape) else jax.tree.leaves(shape, is_leaf=_is_shape)
    fits = jax.tree.structure(shape, is_leaf=_is_shape) == structure or len(leaves) == 1
    if not fits or not all(map(_is_shape, shapes)) or len(shapes) != len(leaves):
        raise ShardingError(
            f"shape={shape!r} is not the global shape of each of "
            f"{', '.join(leaf.name for leaf in leaves) or 'no leaves'}: give a tuple of sizes for "
            "an array, and a tree of tuples with the same structure for a tree"
        )
    for leaf, global_shape in zip(leaves, shapes, strict=True):
        leaf.global_shape = tuple(map(int, global_shape))


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, tuple | list) and all(isinstance(n, int | np.integer) for n in shape)


def _check_owner(mesh: Mesh) -> None:
    owners = sorted({device.process_index for device in mesh.devices.flat})
    if jax.process_index() not in owners:
        raise ShardingError(
            f"process {jax.process_index()} owns no device of the mesh {describe_mesh(mesh)}, "
            f"whose devices belong to {_process_text(owners)}, so it has no blocks of it; call "
            "from_local there only, or iso.shard with the global array in every process"
        )


def _check(leaf: NamedArray, mesh: Mesh, copy: bool | None) -> ShardingError | None:
    """The error that putting the leaf on devices would raise, or None."""
    try:
        sharding, _ = _layout(leaf, mesh)
        value = leaf.value
        if isinstance(value, np.ndarray):
            if check_narrowed(value, copy, leaf.name):
                return None
            check_slices(value, sharding, _slices(sharding, value.shape), copy=copy, name=leaf.name)
        elif isinstance(value, jax.Array):
            _check_array(value, sharding, leaf.name, copy)
    except ShardingError as error:
        return error
    return None


def _check_array(x: jax.Array, sharding: NamedSharding, name: str, copy: bool | None) -> None:
    if isinstance(x, Tracer):
        raise ShardingError(
            f"{name}: a traced value belongs to all processes; constrain it with "
            "iso.shard(x, mesh, spec), or call from_local outside jit"
        )
    if not x.is_fully_addressable:
        raise ShardingError(
            f"{name}: an array of shape {x.shape} is on devices of several processes already; "
            "shard it with iso.reshard(x, mesh, spec)"
        )
    if copy is False and x.sharding.device_set != sharding.addressable_devices:
        raise no_sharing(name, f"its data must move from {x.sharding} to {sharding}")


def _layout(leaf: NamedArray, mesh: Mesh) -> tuple[NamedSharding, tuple[int, ...]]:
    """The sharding and the global shape of a leaf."""
    local = tuple(leaf.value.shape)
    if leaf.global_shape is not None and len(leaf.global_shape) != len(local):
        raise ShardingError(
            f"{leaf.name}: local shape {local} is of another rank than the global shape "
            f"{leaf.global_shape}"
        )
    sharding = named_sharding(leaf.spec, mesh, len(local), shape=leaf.global_shape, name=leaf.name)
    counts, local_blocks = local_block_indices(sharding, len(local))
    if leaf.global_shape is None:
        wrong = [
            f"axis {axis} has local size {size}, and this process has {len(blocks)} of the "
            f"{count} blocks over it"
            for axis, (size, count, blocks) in enumerate(
                zip(local, counts, local_blocks, strict=True)
            )
            if size % len(blocks)
        ]
        if wrong:
            up = [
                -(-size // len(blocks)) * len(blocks)
                for size, blocks in zip(local, local_blocks, strict=True)
            ]
            need = ", ".join(str(n) for n, size in zip(up, local, strict=True) if n != size)
            raise UnevenError(
                f"{leaf.name}: local shape {local} does not fit {sharding.spec}: "
                f"{'; '.join(wrong)}. Give each block the same size: {need} in all, or split "
                "another axis."
            )
        return sharding, global_shape(local, sharding)
    expected = tuple(
        size // count * len(blocks)
        for size, count, blocks in zip(leaf.global_shape, counts, local_blocks, strict=True)
    )
    if expected != local:
        raise ShardingError(
            f"{leaf.name}: local shape {local} does not fit: of the global shape "
            f"{leaf.global_shape} by {sharding.spec}, the local data of process "
            f"{jax.process_index()} has shape {expected}, which is "
            f"{_blocks_text(leaf.global_shape, counts, local_blocks)}. Pass that slice; an array "
            "that every process has in full is sharded with iso.shard(x, mesh, spec)."
        )
    return sharding, leaf.global_shape


def _blocks_text(
    shape: Sequence[int], counts: Sequence[int], local_blocks: Sequence[Sequence[int]]
) -> str:
    """The blocks of a process as text: `[0:4 and 8:12, 0:8]`."""
    axes = []
    for size, count, blocks in zip(shape, counts, local_blocks, strict=True):
        step = size // count
        runs: list[list[int]] = []
        for block in blocks:
            if runs and runs[-1][1] == block * step:
                runs[-1][1] += step
            else:
                runs.append([block * step, (block + 1) * step])
        axes.append(" and ".join(f"{start}:{stop}" for start, stop in runs))
    return f"[{', '.join(axes)}]"


def _compare(
    leaves: Sequence[NamedArray], layouts: dict[str, tuple[NamedSharding, tuple[int, ...]]]
) -> None:
    """Have the processes compare the arrays that they create, if these are new."""
    new = {}
    for leaf in leaves:
        sharding, shape = layouts[leaf.name]
        key = (shape, str(leaf.dtype), sharding)
        if not sharding.is_fully_addressable and key not in _agreed_cache(sharding):
            new[key] = f"{leaf.name}: global {shape} {leaf.dtype} by {_sharding_text(sharding)}"
    if new:
        mesh = mesh_of(next(iter(new))[2])
        assert_equal("local data of one array", [*new.values()], owners_of(mesh))
        for key in new:
            _agreed_cache(key[2])[key] = True


@cached(256)
def owners_of(mesh: Mesh) -> tuple[int, ...]:
    """The processes that own devices of a mesh, ascending. Cached."""
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def _agreed_cache(sharding: NamedSharding) -> Bounded[Any, bool]:
    """The cache of agreed arrays of a mesh's processes, which evict the same entries."""
    new = Bounded[Any, bool](4096, "from_local: what processes agreed on", agreed=True)
    return _agreed.setdefault(owners_of(mesh_of(sharding)), new)


_agreed: dict[tuple[int, ...], Bounded[Any, bool]] = {}


@cached(256)
def _sharding_text(sharding: NamedSharding) -> str:
    """A sharding as text, which is equal in all processes only if the sharding is."""
    mesh = mesh_of(sharding)
    owners = [device.process_index for device in mesh.devices.flat]
    return f"{sharding.spec} on {describe_mesh(mesh)} of processes {owners}"


def _put(
    leaf: NamedArray, sharding: NamedSharding, shape: tuple[int, ...], mesh: Mesh, copy: bool | None
) -> Any:
    value = leaf.value
    if leaf.framework is not None:
        return leaf.framework.from_local(
            value, mesh, leaf.spec, shape=shape, copy=copy, name=leaf.name
        )
    slices = _slices(sharding, value.shape)
    if isinstance(value, np.ndarray):
        host = narrowed(value, copy, leaf.name)
        copy = copy if host is value else None
        return slices_to_jax(host, sharding, shape, slices, copy=copy, name=leaf.name)
    return put_slices(value, sharding, shape, slices, copy=copy)


@cached(4096)
def _slices(sharding: NamedSharding, local: tuple[int, ...]) -> tuple[HostSlice, ...]:
    """The slices of local data for this process's devices."""
    _, local_blocks = local_block_indices(sharding, len(local))
    steps = [size // len(blocks) for size, blocks in zip(local, local_blocks, strict=True)]
    block_of = Tiles.from_sharding(sharding, len(local)).block_of()
    slices = []
    for device, position in positions(sharding).items():
        if device.process_index != jax.process_index():
            continue
        block = block_of[position]
        at = [blocks.index(b) for blocks, b in zip(local_blocks, block, strict=True)]
        index = tuple(slice(a * n, (a + 1) * n) for a, n in zip(at, steps, strict=True))
        start = tuple(b * n for b, n in zip(block, steps, strict=True))
        slices.append(HostSlice(device, position, start, index))
    return tuple(slices)


@cached(4096)
def local_block_indices(
    sharding: NamedSharding, ndim: int
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The number of blocks over each axis, and the indices of this process's blocks.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> local_block_indices(named_sharding(P("x"), make_mesh((2, 4), ("x", "y")), 2), 2)
        ((2, 1), ((0, 1), (0,)))
    """
    tiles = Tiles.from_sharding(sharding, ndim)
    block_of = tiles.block_of()
    local = [
        block_of[position]
        for device, position in positions(sharding).items()
        if device.process_index == jax.process_index()
    ]
    per_axis = tuple(tuple(sorted({block[axis] for block in local})) for axis in range(ndim))
    return tiles.blocks, per_axis


def global_shape(local: Sequence[int], sharding: NamedSharding) -> tuple[int, ...]:
    """The global shape, if all blocks are as large as those of this process."""
    counts, local_blocks = local_block_indices(sharding, len(local))
    sizes = zip(local, counts, local_blocks, strict=True)
    return tuple(size // max(1, len(blocks)) * count for size, count, blocks in sizes)


def _process_text(ids: Sequence[int]) -> str:
    return f"process{'es' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"
