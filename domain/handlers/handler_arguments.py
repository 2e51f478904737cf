"""The arguments of a function with a handler: arrays and their shardings, and the rest.

An array has a sharding, an `UnevenArray` also where it is traced. A NumPy array, and an uncommitted
JAX array, is replicated. A value that `jax.jit` traces has none, so the caller declares it
(`Routed.over`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.kit import (
    ArrayLayout,
    ShardingError,
    Tracer,
    UnevenArray,
    as_mesh,
    cached,
    closed_sharding_of,
    describe_mesh,
    entries_of,
    exact,
    is_uneven,
    layout_of,
    named_sharding,
    padded_of,
    same_grid,
    same_layout,
)

Path = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Static:
    """An argument that is no array; 1, 1.0 and True are three."""

    value: Any = dataclasses.field(compare=False)
    key: Any


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of a call, without the values of arrays. Hashable.

    Attributes:
        structure: of `(args, kwargs)`.
        paths: of each leaf: its position or keyword, then keys inside the argument.
        frames: of each leaf: an ArrayLayout, or a Static.
        mesh: that of the layouts; None if there is none.
    """

    structure: Any
    paths: tuple[Path, ...]
    frames: tuple[ArrayLayout | Static, ...]
    mesh: Mesh | None

    @property
    def split(self) -> bool:
        """Whether an array is split over devices, or in blocks."""
        layouts = [frame for frame in self.frames if isinstance(frame, ArrayLayout)]
        return any(
            layout.uneven or any(len(sizes) > 1 for sizes in layout.sizes) for layout in layouts
        )

    def filled(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these arrays."""
        rest = iter(arrays)
        leaves = [f.value if isinstance(f, Static) else next(rest) for f in self.frames]
        return jax.tree.unflatten(self.structure, leaves)

    def arrays(self) -> list[tuple[Path, ArrayLayout]]:
        """The path and layout of each array."""
        pairs = zip(self.paths, self.frames, strict=True)
        return [(path, frame) for path, frame in pairs if isinstance(frame, ArrayLayout)]


def read(
    args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Any, specs: Any, name: str
) -> tuple[Arguments, list[Any]]:
    """Find the shardings of a call's arrays.

    Raises:
        ShardingError: meshes differ, a sharding is unknown, or is not the declared one; all
            errors in one message.
        TypeError: an argument is neither an array nor hashable.
    """
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_uneven)
    paths = paths_of(structure)
    specs_by_argument = {} if mesh is None else _specs_by_argument(paths, specs, name)
    grid = as_mesh(mesh, abstract=True) if mesh is not None else _common_mesh(paths, leaves, name)
    errors: list[str] = []
    frames, arrays = [], []
    for path, leaf in zip(paths, leaves, strict=True):
        if not _is_array(leaf):
            frames.append(_static(leaf, path, name))
            continue
        if path[0] in specs_by_argument and not isinstance(leaf, jax.Array | UnevenArray):
            leaf = jnp.asarray(leaf)
        layout = _layout(
            leaf,
            grid,
            specs_by_argument.get(path[0], _UNDECLARED),
            describe_path(path),
            name,
            errors,
        )
        frames.append(layout)
        arrays.append(leaf.array if isinstance(leaf, UnevenArray) else leaf)
    if errors:
        raise ShardingError(f"{name}: {'; '.join(errors)}")
    return Arguments(structure, paths, tuple(frames), grid), arrays


def describe_path(path: Path) -> str:
    """An argument's path for messages.

    Example:
        >>> describe_path((0,)), describe_path(("x", "rows", 1))
        ('argument 0', "argument 'x'['rows'][1]")
    """
    return f"argument {path[0]!r}{''.join(f'[{key!r}]' for key in path[1:])}"


@cached(1024)
def paths_of(structure: Any) -> tuple[Path, ...]:
    """The path of each leaf of `(args, kwargs)`: a position or keyword, keys inside the argument.

    Example:
        >>> paths_of(jax.tree.structure(((1, [2, 3]), {"k": 4})))
        ((0,), (1, 0), (1, 1), ('k',))
    """
    indices = jax.tree.unflatten(structure, range(structure.num_leaves))
    leaves = jax.tree_util.tree_flatten_with_path(indices)[0]
    return tuple(tuple(map(_plain, keys[1:])) for keys, _ in leaves)


def _plain(key: Any) -> Any:
    return getattr(key, "idx", getattr(key, "key", getattr(key, "name", key)))


_UNDECLARED = object()


def _layout(leaf: Any, mesh: Mesh | None, spec: Any, where: str, name: str, errors: Any) -> Any:
    array = padded_of(leaf)
    sharding = _sharding_of(leaf)
    if spec is not _UNDECLARED and mesh is not None:
        declared = named_sharding(spec, mesh, array.ndim, name=f"{name}: {where}")
        if isinstance(sharding, NamedSharding) and not (
            same_grid(sharding.mesh, mesh) and same_layout(sharding, declared, array.ndim)
        ):
            errors.append(
                f"{where} is sharded as {sharding.spec} over {describe_mesh(sharding.mesh)}, and "
                f"over() declares {declared.spec} over {describe_mesh(mesh)}: leave it out there, "
                "or iso.reshard it"
            )
            return None
        return _layout_on(leaf, declared, name, where)
    if isinstance(sharding, NamedSharding):
        return _layout_on(leaf, sharding, name, where)
    if sharding is None:
        errors.append(
            f"{where} is traced, and a traced value has no sharding: declare one for every "
            f"argument, {name}.over(mesh, spec, ..)(..), with None for one that is not split"
        )
        return None
    if (
        sharding is not _UNCOMMITTED
        and mesh is not None
        and set(mesh.devices.flat) != sharding.device_set
    ):
        errors.append(
            f"{where} is on {', '.join(map(str, sharding.device_set))} alone, and other arguments "
            f"on the mesh {describe_mesh(mesh)}: move it there, iso.shard(x, mesh, spec)"
        )
    return replicated_layout(tuple(array.shape), mesh)


def replicated_layout(shape: tuple[int, ...], mesh: Any) -> ArrayLayout:
    """The sharding of a replicated array, on a mesh or on none."""
    sizes = tuple((size,) for size in shape)
    return ArrayLayout(mesh, ((),) * len(shape), sizes, shape, False)


def _layout_on(leaf: Any, sharding: NamedSharding, name: str, where: str) -> ArrayLayout:
    return layout_of(leaf, sharding.mesh, sharding.spec, verb=f"{name}: {where}")


_UNCOMMITTED: Any = object()  # the sharding of an uncommitted array


def _sharding_of(leaf: Any) -> Any:
    """The sharding of an array; None if it is unknown."""
    if is_uneven(leaf) and leaf.layout is not None:
        is_constrained = P.UNCONSTRAINED not in entries_of(leaf.layout.spec)  # inside `lift`
        return leaf.layout if is_constrained else None
    array = padded_of(leaf)
    if isinstance(array, Tracer):
        value = array.to_concrete_value()  # `jax.grad` has it, `jax.jit` has not
        if value is None:
            return closed_sharding_of(leaf)
        array = value
    if not isinstance(array, jax.Array):
        return _UNCOMMITTED
    named = isinstance(array.sharding, NamedSharding)
    return array.sharding if named or array.committed else _UNCOMMITTED


def _common_mesh(paths: Sequence[Path], leaves: Sequence[Any], name: str) -> Any:
    meshes: dict[Any, list[str]] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        sharding = _sharding_of(leaf) if _is_array(leaf) else None
        if isinstance(sharding, NamedSharding):
            meshes.setdefault(sharding.mesh, []).append(describe_path(path))
    if len(meshes) > 1:
        lines = [
            f"{', '.join(sharding)} on {describe_mesh(mesh)}" for mesh, sharding in meshes.items()
        ]
        raise ShardingError(
            f"{name}: the arguments are on {len(meshes)} different meshes: {'; '.join(lines)}. "
            "Move them to one: iso.reshard(x, mesh, spec)."
        )
    return next(iter(meshes), None)


def _specs_by_argument(paths: Sequence[Path], specs: Any, name: str) -> dict[Any, Any]:
    """The declared spec of each argument, by position or keyword."""
    args, kwargs = specs
    declared = {**dict(enumerate(args)), **kwargs}
    present = {path[0] for path in paths}
    extra = [key for key in declared if key not in present and declared[key] is not None]
    if extra:
        raise ShardingError(
            f"{name}: over() declares a spec of "
            f"{', '.join(describe_path((key,)) for key in extra)}, which the call does not have"
        )
    return declared


def _static(leaf: Any, path: Path, name: str) -> Static:
    try:
        hash(leaf)
    except TypeError:
        raise TypeError(
            f"{name}: {describe_path(path)} is a {type(leaf).__name__}, which is neither an array "
            "nor hashable"
        ) from None
    return Static(leaf, exact(leaf))


def _is_array(leaf: Any) -> bool:
    return is_uneven(leaf) or isinstance(leaf, jax.Array | np.ndarray | np.generic)
