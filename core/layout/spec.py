"""Specs: every spelling of a sharding, and their canonical form.

A spec has one entry per tensor axis: the mesh axis (or axes, outermost first) that splits it, or
None. The canonical form is a `PartitionSpec` without trailing None and without 1-tuples, so that
equal specs are equal objects.

>>> from isoshard.core.layout.mesh import make_mesh
>>> mesh = make_mesh((2, 4), ("x", "y"))
>>> normalize_spec(P("x", None), mesh, 2)                # JAX
P('x',)
>>> normalize_spec(("x", None), mesh, 2)                 # tuples of axis names
P('x',)
>>> normalize_spec((0, None), mesh, 2)                   # axis indices, as torch_xla
P('x',)
>>> normalize_spec((None, (0, 1)), mesh, 2)              # two mesh axes split one tensor axis
P(None, ('x', 'y'))
>>> normalize_spec("{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}", mesh, 2)   # XLA
P(None, 'y')
>>> normalize_spec(None, mesh, 2)                        # replicated
P()

`register_spelling` adds further ones: OpSharding strings are one, DTensor placements another. A
mesh axis of size 1 splits nothing but keeps its name: on a larger mesh the same spec splits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError, SpecError, UnevenError
from isoshard.core.runtime.caches import cached

from .axis_types import same_devices, same_grid
from .mesh import as_mesh, describe_mesh
from .offload import check_memory, is_offloaded
from .partial_sums import reduced, stored, unreduced, with_sums
from .spec_entries import axis_names as axis_names
from .spec_entries import canonical_spec, entries_of, is_axis, is_group

if TYPE_CHECKING:
    from .tiles import Tiles

SpecLike = Any
"""P, tuple of (str | int | None | tuple), None, NamedSharding, str, or what a bridge registered."""

Predicate = Callable[[Any], bool]
ToTiles = Callable[[Any, Mesh, int], "Tiles"]
_spellings: list[tuple[Predicate, ToTiles]] = []


def normalize_spec(
    spec: SpecLike,
    mesh: Mesh,
    ndim: int,
    *,
    shape: Sequence[int] | None = None,
    name: str | None = None,
) -> P:
    """Bring any spelling of a spec into the canonical form.

    Args:
        spec: a PartitionSpec; a tuple of axis names, axis indices, None, or tuples of those; None;
            a NamedSharding over the same devices in the same order; an OpSharding string; or a
            registered spelling.
        mesh: the mesh, or what `as_mesh` takes.
        ndim: rank of the tensor.
        shape: its global shape; if given, each axis must split evenly.
        name: of the tensor, for messages.

    Returns:
        The spec, without trailing None and without 1-tuples.

    Raises:
        SpecError: an entry is no mesh axis, an axis is used twice, or there are more entries than
            tensor axes; all errors in one message.
        UnevenError: a tensor axis is no multiple of its number of shards.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> normalize_spec(("z", -1), make_mesh((2, 4), ("x", "y")), 1, name="bias")
        Traceback (most recent call last):
            ...
        isoshard.core.errors.SpecError: bias: spec ('z', -1) does not fit: no mesh axis is called 'z'; there is no mesh axis -1 (indices count from 0); it has 2 entries for a tensor of rank 1. The mesh axes are 'x' (2), 'y' (4): name them, or give their indices 0..1.
    """  # noqa: E501
    if not isinstance(mesh, Mesh):
        mesh = as_mesh(mesh, abstract=True)
    try:
        canonical = _cached(_Key(spec), mesh, ndim)
    except TypeError:  # unhashable: a list somewhere
        canonical = None
    if canonical is None:
        canonical = _translate(spec, mesh, ndim, name or "tensor")
    if shape is not None:
        check_even(canonical, mesh, shape, name=name or "tensor")
    return canonical


def named_sharding(
    spec: SpecLike,
    mesh: Any,
    ndim: int,
    *,
    shape: Sequence[int] | None = None,
    name: str = "tensor",
    sums: bool = False,
) -> NamedSharding:
    """The NamedSharding of any spelling of a spec; equal shardings are one object.

    Args:
        spec: as for `normalize_spec`.
        mesh: the mesh, or what `as_mesh` takes.
        ndim: rank of the tensor.
        shape: its global shape; if given, each axis must split evenly.
        name: of the tensor, for messages.
        sums: whether the spec may have unreduced and reduced axes (see `partial_sums`).

    Returns:
        The sharding, its spec canonical; in the memory kind of a NamedSharding.

    Raises:
        SpecError, UnevenError: as `normalize_spec`.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> mesh = make_mesh((2, 4), ("x", "y"))
        >>> named_sharding(("x", None), mesh, 2) is named_sharding(P("x"), mesh, 2)
        True
    """
    mesh = as_mesh(mesh, abstract=True)
    if sums and (unreduced(spec) or reduced(spec)):
        plain = stored(spec) if isinstance(spec, NamedSharding) else P(*entries_of(spec))
        sharding = named_sharding(plain, mesh, ndim, shape=shape, name=name)
        return with_sums(sharding, spec, name)
    canonical = normalize_spec(spec, mesh, ndim, shape=shape, name=name)
    if isinstance(spec, NamedSharding) and is_offloaded(spec):
        check_memory(mesh, spec.memory_kind, name=name)
        return _interned(mesh, canonical, memory_kind=spec.memory_kind)
    return _interned(mesh, canonical)


def check_even(spec: P, mesh: Mesh, shape: Sequence[int], *, name: str = "tensor") -> None:
    """Check that every axis of a tensor splits into equal shards.

    Args:
        spec: canonical.
        mesh: its mesh.
        shape: global shape of the tensor.
        name: of the tensor, for messages.

    Raises:
        UnevenError: naming each axis that does not divide.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> check_even(P("y"), make_mesh((2, 4), ("x", "y")), (6, 3), name="weight")
        Traceback (most recent call last):
            ...
        isoshard.core.errors.UnevenError: weight: shape (6, 3) does not split evenly by P('y',): axis 0 has size 6, which is no multiple of its 4 shards. Pad it to 8, or split another axis.
    """  # noqa: E501
    shards = _shard_counts(spec, mesh)
    wrong = [
        (axis, size, count)
        for axis, (size, count) in enumerate(zip(shape, shards, strict=False))
        if size % count
    ]
    if wrong:
        errors = "; ".join(
            f"axis {axis} has size {size}, which is no multiple of its {count} shards"
            for axis, size, count in wrong
        )
        padded = " and ".join(str(-(-size // count) * count) for _, size, count in wrong)
        raise UnevenError(
            f"{name}: shape {tuple(shape)} does not split evenly by {spec}: {errors}. "
            f"Pad {'it' if len(wrong) == 1 else 'them'} to {padded}, or split another axis."
        )


def same_layout(a: Sharding, b: Sharding, ndim: int) -> bool:
    """Whether two shardings put the same blocks of a tensor of rank `ndim` on the same devices.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> mesh = make_mesh((8, 1), ("x", "y"))
        >>> same_layout(NamedSharding(mesh, P("x", "y")), NamedSharding(mesh, P("x")), 2)
        True
    """
    if a is b:
        return True
    if not any(isinstance(getattr(sharding, "mesh", None), AbstractMesh) for sharding in (a, b)):
        return a.is_equivalent_to(b, ndim)
    return _axes(a, ndim) == _axes(b, ndim)  # which JAX 0.9 does not compare


def _axes(layout: Sharding, ndim: int) -> Any:
    """A key of a sharding that is equal for equivalent shardings over one mesh."""
    if not isinstance(layout, NamedSharding):
        return layout
    mesh, spec = layout.mesh, layout.spec
    axes = [
        tuple(axis for axis in axis_names(entry) if mesh.shape[axis] > 1)
        for entry in (*entries_of(spec), *[None] * ndim)[:ndim]
    ]
    return mesh, axes, spec.unreduced, spec.reduced, layout.memory_kind


def register_spelling(accepts: Predicate, to_tiles: ToTiles) -> Callable[[], None]:
    """Register one more notation with `normalize_spec`.

    Args:
        accepts: whether an object is a spec in this notation.
        to_tiles: called as `to_tiles(spec, mesh, ndim)`; returns the `Tiles` over the flattened
            mesh, or raises ShardingError.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> from isoshard.core.layout.tiles import Tiles
        >>> class Rows: ...
        >>> forget = register_spelling(
        ...     lambda spec: isinstance(spec, Rows),
        ...     lambda spec, mesh, ndim: Tiles.from_spec(P(mesh.axis_names), mesh, ndim),
        ... )
        >>> normalize_spec(Rows(), make_mesh((2, 4), ("x", "y")), 2)
        P(('x', 'y'),)
        >>> forget()
    """
    spelling = (accepts, to_tiles)
    _spellings.append(spelling)
    _cached.cache_clear()  # cached failures may be specs of the new notation

    def forget() -> None:
        _spellings.remove(spelling)
        _cached.cache_clear()

    return forget


def is_spec(obj: Any) -> bool:
    """Whether `obj` reads as one spec, rather than as a tree of specs.

    A tuple or list of names, indices, None and tuples of names or indices is one spec.

    Example:
        >>> is_spec((0, None)), is_spec([P("x"), P()]), is_spec({"w": P()})
        (True, False, False)
    """
    if obj is None or isinstance(obj, P | NamedSharding | str):
        return True
    if any(accepts(obj) for accepts, _ in _spellings):
        return True
    return type(obj) in (tuple, list) and all(
        item is None or is_axis(item) or (is_group(item) and all(map(is_axis, item)))
        for item in obj
    )


_interned = cached(8192, "core.layout.spec: shardings")(NamedSharding)


@cached(8192)
def _shard_counts(spec: P, mesh: Mesh) -> tuple[int, ...]:
    return tuple(math.prod(mesh.shape[name] for name in axis_names(entry)) for entry in spec)


class _Key:
    """A spec as a cache key, with types: `(0,)`, `(False,)` and `(0.0,)` are equal in Python."""

    __slots__ = ("_hash", "kinds", "spec")

    def __init__(self, spec: SpecLike) -> None:
        self.spec = spec
        items = getattr(spec, "partitions", spec) if isinstance(spec, P) else spec
        self.kinds = (type(spec), *map(type, items)) if isinstance(items, tuple) else type(spec)
        self._hash = hash(spec)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.kinds == other.kinds and self.spec == other.spec


@cached(8192)
def _cached(key: _Key, mesh: Mesh, ndim: int) -> P | None:
    """Translate, or None if that fails: the caller raises again, with the tensor's name."""
    try:
        return _translate(key.spec, mesh, ndim, "tensor")
    except ShardingError:
        return None


def _translate(spec: SpecLike, mesh: Mesh, ndim: int, name: str) -> P:
    if isinstance(spec, NamedSharding) and same_grid(_of_same_devices(spec, mesh, name), mesh):
        spec = spec.spec
    for accepts, to_tiles in _spellings:
        if accepts(spec):
            return _named(name, to_tiles, spec, mesh, ndim)
    return canonical_spec(spec, mesh, ndim, name)


def _named(name: str, translate: ToTiles, spec: SpecLike, mesh: Mesh, ndim: int) -> P:
    """The spec of a translated notation; errors get the tensor's name."""
    try:
        return translate(spec, mesh, ndim).to_spec(mesh)
    except ShardingError as error:
        raise type(error)(f"{name}: {error}") from None


def _of_same_devices(sharding: NamedSharding, mesh: Mesh, name: str) -> Any:
    """The mesh of a sharding, whose devices are those of another mesh."""
    theirs = sharding.mesh
    if not same_devices(theirs, mesh):
        raise SpecError(
            f"{name}: the NamedSharding is over a mesh of {describe_mesh(theirs)} whose devices "
            f"are others, or in another order, than those of the mesh {describe_mesh(mesh)}; "
            "pass its .spec, or that mesh."
        )
    return theirs


def stacked_sharding(sharding: NamedSharding) -> NamedSharding:
    """The sharding of a stack of arrays that have one each: the leading axis is not split."""
    spec = P(None, *sharding.spec)
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
