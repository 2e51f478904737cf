"""The arguments of a function with a handler: arrays and their layouts, and the rest.

An array tells its layout, an `UnevenArray` also where it is traced. A NumPy array, and a JAX array
that was never put anywhere, is whole on every device. A value that `jax.jit` traces tells nothing,
so there the caller does (`Routed.over`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.domain.blocks.array_layout import ArrayLayout, layout_of
from isoshard.core.domain.blocks.known_shardings import known_sharding_of
from isoshard.core.errors import ShardingError
from isoshard.core.layout.axis_types import same_grid
from isoshard.core.layout.mesh import as_mesh, describe_mesh
from isoshard.core.layout.spec import named_sharding, same_layout
from isoshard.core.layout.spec_entries import entries_of
from isoshard.core.layout.uneven import UnevenArray, is_uneven, padded_of
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.exact_keys import exact

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
        paths: of each leaf: its place or keyword, then keys inside the argument.
        frames: of each leaf: a Layout, or a Static.
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
    """Find the layouts of a call's arrays.

    Args:
        args: of the call.
        kwargs: likewise.
        mesh: theirs as the caller says; None if he says nothing.
        specs: with a mesh, `(args, kwargs)` with a spec, or None, for each argument.
        name: of the function, for messages.

    Returns:
        The arguments, and the values of the arrays.

    Raises:
        ShardingError: meshes differ, a layout is not known, or is another than was said; all
            faults in one message.
        TypeError: an argument is neither an array nor hashable.
    """
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_uneven)
    paths = paths_of(structure)
    given = {} if mesh is None else _specs_by_argument(paths, specs, name)
    grid = as_mesh(mesh, abstract=True) if mesh is not None else _one_mesh(paths, leaves, name)
    faults: list[str] = []
    frames, arrays = [], []
    for path, leaf in zip(paths, leaves, strict=True):
        if not _is_array(leaf):
            frames.append(_static(leaf, path, name))
            continue
        if path[0] in given and not isinstance(leaf, jax.Array | UnevenArray):
            leaf = jnp.asarray(leaf)
        layout = _layout(leaf, grid, given.get(path[0], _UNSAID), place(path), name, faults)
        frames.append(layout)
        arrays.append(leaf.array if isinstance(leaf, UnevenArray) else leaf)
    if faults:
        raise ShardingError(f"{name}: {'; '.join(faults)}")
    return Arguments(structure, paths, tuple(frames), grid), arrays


def place(path: Path) -> str:
    """An argument's place in words.

    Example:
        >>> place((0,)), place(("x", "rows", 1))
        ('argument 0', "argument 'x'['rows'][1]")
    """
    return f"argument {path[0]!r}{''.join(f'[{key!r}]' for key in path[1:])}"


@functools.lru_cache(maxsize=1024)
def paths_of(structure: Any) -> tuple[Path, ...]:
    """Where each leaf of `(args, kwargs)` stands: a place or keyword, keys inside the argument.

    Example:
        >>> paths_of(jax.tree.structure(((1, [2, 3]), {"k": 4})))
        ((0,), (1, 0), (1, 1), ('k',))
    """
    whole = jax.tree.unflatten(structure, range(structure.num_leaves))
    found = jax.tree_util.tree_flatten_with_path(whole)[0]
    return tuple(tuple(map(_plain, keys[1:])) for keys, _ in found)


def _plain(key: Any) -> Any:
    return getattr(key, "idx", getattr(key, "key", getattr(key, "name", key)))


_UNSAID = object()


def _layout(leaf: Any, mesh: Mesh | None, spec: Any, where: str, name: str, faults: Any) -> Any:
    array = padded_of(leaf)
    own = _own_sharding(leaf)
    if spec is not _UNSAID and mesh is not None:
        said = named_sharding(spec, mesh, array.ndim, name=f"{name}: {where}")
        if isinstance(own, NamedSharding) and not (
            same_grid(own.mesh, mesh) and same_layout(own, said, array.ndim)
        ):
            faults.append(
                f"{where} lies as {own.spec} over {describe_mesh(own.mesh)}, and over() says "
                f"{said.spec} over {describe_mesh(mesh)}: leave it out there, or lay it out anew "
                "with iso.reshard"
            )
            return None
        return _laid(leaf, said, name, where)
    if isinstance(own, NamedSharding):
        return _laid(leaf, own, name, where)
    if own is None:
        faults.append(
            f"{where} is traced, and such a value does not tell how it lies: say it for every "
            f"argument, {name}.over(mesh, spec, ..)(..), with None for one that is whole"
        )
        return None
    if own is not _ANYWHERE and mesh is not None and set(mesh.devices.flat) != own.device_set:
        faults.append(
            f"{where} lies on {', '.join(map(str, own.device_set))} alone, and other arguments on "
            f"the mesh {describe_mesh(mesh)}: lay it out there, iso.shard(x, mesh, spec)"
        )
    return whole(tuple(array.shape), mesh)


def whole(shape: tuple[int, ...], mesh: Any) -> ArrayLayout:
    """The layout of a replicated array, on a mesh or on none."""
    sizes = tuple((size,) for size in shape)
    return ArrayLayout(mesh, ((),) * len(shape), sizes, shape, False)


def _laid(leaf: Any, sharding: NamedSharding, name: str, where: str) -> ArrayLayout:
    return layout_of(leaf, sharding.mesh, sharding.spec, verb=f"{name}: {where}")


_ANYWHERE: Any = object()  # the layout of what was never put on a device


def _own_sharding(leaf: Any) -> Any:
    """The layout of an array; None if that is not known."""
    if is_uneven(leaf) and leaf.layout is not None:
        known = P.UNCONSTRAINED not in entries_of(leaf.layout.spec)  # inside `lift`
        return leaf.layout if known else None
    array = padded_of(leaf)
    if isinstance(array, Tracer):
        held = array.to_concrete_value()  # `jax.grad` has it, `jax.jit` has not
        if held is None:
            return known_sharding_of(leaf)
        array = held
    if not isinstance(array, jax.Array):
        return _ANYWHERE
    named = isinstance(array.sharding, NamedSharding)
    return array.sharding if named or array.committed else _ANYWHERE


def _one_mesh(paths: Sequence[Path], leaves: Sequence[Any], name: str) -> Any:
    meshes: dict[Any, list[str]] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        own = _own_sharding(leaf) if _is_array(leaf) else None
        if isinstance(own, NamedSharding):
            meshes.setdefault(own.mesh, []).append(place(path))
    if len(meshes) > 1:
        lines = [f"{', '.join(own)} on {describe_mesh(mesh)}" for mesh, own in meshes.items()]
        raise ShardingError(
            f"{name}: the arguments lie on {len(meshes)} different meshes: {'; '.join(lines)}. Lay "
            "them out on one: iso.reshard(x, mesh, spec)."
        )
    return next(iter(meshes), None)


def _specs_by_argument(paths: Sequence[Path], specs: Any, name: str) -> dict[Any, Any]:
    """What was said of each argument, by place or keyword."""
    args, kwargs = specs
    given = {**dict(enumerate(args)), **kwargs}
    there = {path[0] for path in paths}
    extra = [key for key in given if key not in there and given[key] is not None]
    if extra:
        raise ShardingError(
            f"{name}: over() says how {', '.join(place((key,)) for key in extra)} lies, which the "
            "call does not have"
        )
    return given


def _static(leaf: Any, path: Path, name: str) -> Static:
    try:
        hash(leaf)
    except TypeError:
        raise TypeError(
            f"{name}: {place(path)} is a {type(leaf).__name__}, which is neither an array nor "
            "hashable"
        ) from None
    return Static(leaf, exact(leaf))


def _is_array(leaf: Any) -> bool:
    return is_uneven(leaf) or isinstance(leaf, jax.Array | np.ndarray | np.generic)
