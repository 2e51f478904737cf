"""Shardings as small integers.

Hashing a `NamedSharding` costs a microsecond, and a training step has hundreds of them. Each
distinct layout is interned once; from then on the engine compares and hashes integers. A number may
stand in a value or a compile key, so a layout is kept for ever, and nothing bounds how many: there
are as many as a program names meshes, specs and sizes of unequal blocks.

>>> from isoshard import P, make_mesh
>>> mesh = make_mesh((8,), ("x",))
>>> number = intern(jax.sharding.NamedSharding(mesh, P("x")))
>>> number == intern(jax.sharding.NamedSharding(mesh, P("x")))
True
>>> sharding(number).spec
P('x',)

Programs are compiled under Auto axes: `layout` and `sharding` are over them, and so are the arrays
that values hold. A layout over a mesh with Explicit axes has a number of its own, which `as_named`
knows by: that is what users see, and what results are handed out in. So has one whose program ran
over a finer mesh, as it read tensors on other meshes as well (`common_mesh`): `said_on` makes it.

>>> typed = jax.sharding.NamedSharding(jax.make_mesh((8,), ("x",)), P("x"))
>>> intern(typed) == number, untyped(intern(typed)) == number
(False, True)
>>> as_named(intern(typed)) == typed, sharding(intern(typed)) == sharding(number)
(True, True)
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax
from jax.sharding import Mesh

from isoshard.core.blocks.block_layout import BlockLayout
from isoshard.core.errors import ShardingError
from isoshard.core.layout.axis_types import auto, is_typed, on_mesh, same_grid
from isoshard.core.layout.mesh import mesh_of
from isoshard.core.layout.offload import is_offloaded, on_device
from isoshard.core.layout.partial_sums import stored
from isoshard.core.layout.spec import named_sharding
from isoshard.core.layout.virtual_devices import Device
from isoshard.core.runtime.caches import cached

UNPLACED = -1
"""The layout of a value that may be placed wherever a program needs it."""

Layout = jax.sharding.Sharding | BlockLayout

_LAYOUTS: list[Layout] = []
_NAMED: list[Layout] = []
_NUMBERS: dict[tuple[Layout, Layout], int] = {}
_GROUPS: list[tuple[Device, ...]] = []
_REPLICATED: dict[int, int] = {}
_NUMBERING = threading.Lock()


@functools.cache
def intern(layout: Layout) -> int:
    """The number of a layout; equal ones have equal numbers."""
    return _numbered(_under_auto(layout), layout)


def _numbered(computed: Layout, named: Layout) -> int:
    """The number of a layout that programs have in one way, and users in another."""
    with _NUMBERING:
        number = _NUMBERS.get((computed, named))  # another thread may ask at the same time
        if number is None:
            number = _NUMBERS[computed, named] = len(_LAYOUTS)
            _GROUPS.append(_assignment(named))
            _LAYOUTS.append(computed)
            _NAMED.append(stored(named))  # a reduced axis is one of copies
    return number


def layout(number: int) -> Layout:
    """The layout behind a number, under Auto axes: a sharding, or blocks with padding."""
    return _LAYOUTS[number]


def as_named(number: int) -> Layout:
    """The layout behind a number on the mesh of whoever named it."""
    return _NAMED[number]


def untyped(number: int) -> int:
    """The number of the same layout under Auto axes."""
    if number == UNPLACED or _NAMED[number] is _LAYOUTS[number]:
        return number
    return intern(_LAYOUTS[number])


def computed_as(layout: Layout, number: int) -> int:
    """The number of a layout that users see as they do that of another number.

    Args:
        layout: under Auto axes.
        number: of the same blocks on the same devices.
    """
    return _numbered(layout, _NAMED[number])


def said_on(number: int, mesh: Mesh | None) -> int:
    """The number of the same layout as users see it on another mesh of the same devices.

    Args:
        number: of a layout.
        mesh: may be None, or have no axes to say it with; then the number stays.

    >>> from isoshard import P, make_mesh
    >>> mesh, fine = make_mesh((8,), ("x",)), make_mesh((2, 4), ("axis0", "axis1"))
    >>> number = intern(jax.sharding.NamedSharding(fine, P(("axis0", "axis1"))))
    >>> seen = said_on(number, mesh)
    >>> as_named(seen).spec, sharding(seen).spec, said_on(seen, fine) == number
    (P('x',), P(('axis0', 'axis1'),), True)
    """
    found = None if number == UNPLACED else sharding(number)
    if mesh is None or not isinstance(found, jax.sharding.NamedSharding):
        return number
    same = restated(found, mesh)
    if same is None:
        return number
    blocks = _LAYOUTS[number]
    named = blocks.on(same) if isinstance(blocks, BlockLayout) else same
    return intern(named) if _under_auto(named) == blocks else _numbered(blocks, named)


@cached(4096)
def restated(found: jax.sharding.NamedSharding, mesh: Mesh) -> jax.sharding.NamedSharding | None:
    """The same blocks on the same devices, in the axes of another mesh; None if it has none."""
    if same_grid(found.mesh, mesh):
        return on_mesh(found, mesh)
    try:
        return named_sharding(found, mesh, len(found.spec))
    except ShardingError:
        return None


def is_restated(number: int) -> bool:
    """Whether users see a layout on another mesh than programs have it on."""
    return number != UNPLACED and _NAMED[number] is not _LAYOUTS[number]


def users_mesh(number: int) -> Mesh | None:
    """The mesh that users see a layout on; None if it is on none."""
    found: Any = None if number == UNPLACED else _NAMED[number]
    found = found.sharding if isinstance(found, BlockLayout) else found
    return mesh_of(found) if isinstance(found, jax.sharding.NamedSharding) else None


def typed_mesh(number: int) -> Mesh | None:
    """The mesh of a layout, if it has Explicit axes."""
    mesh = users_mesh(number)
    return mesh if mesh is not None and is_typed(mesh) else None


def sharding(number: int) -> jax.sharding.Sharding:
    """The sharding behind a number; of blocks with padding, that of the padded array."""
    found = _LAYOUTS[number]
    return found.sharding if isinstance(found, BlockLayout) else found


def computed(number: int) -> Layout:
    """The layout of a number inside a program: in the memory that the devices compute in."""
    found = _LAYOUTS[number]
    return on_device(found) if is_offloaded(found) else found


def is_resting(number: int) -> bool:
    """Whether a layout is in another memory than its devices compute in."""
    return number != UNPLACED and is_offloaded(_LAYOUTS[number])


def blocks(number: int) -> BlockLayout | None:
    """The blocks with padding behind a number; None for any other layout, and for none."""
    found = None if number == UNPLACED else _LAYOUTS[number]
    return found if isinstance(found, BlockLayout) else None


def devices(number: int) -> tuple[Device, ...]:
    """The devices of a layout, in the order in which programs number them."""
    return _GROUPS[number]


def replicated_like(number: int) -> int:
    """The layout that keeps a whole copy on every device of another layout."""
    found = _REPLICATED.get(number)
    if found is None:
        like = sharding(number)
        if isinstance(like, jax.sharding.NamedSharding):
            like = jax.sharding.NamedSharding(like.mesh, jax.sharding.PartitionSpec())
        mesh, whole = users_mesh(number), intern(like)
        found = whole if mesh is None else said_on(whole, auto(mesh))
        _REPLICATED[number] = found
    return found


def _under_auto(layout: Layout) -> Layout:
    found = layout.sharding if isinstance(layout, BlockLayout) else layout
    if not isinstance(found, jax.sharding.NamedSharding) or not is_typed(found.mesh):
        return layout
    untyped = on_mesh(found, auto(mesh_of(found)))
    return layout.on(untyped) if isinstance(layout, BlockLayout) else untyped


def _assignment(value: Layout) -> tuple[Device, ...]:
    if isinstance(value, BlockLayout):
        value = value.sharding
    if isinstance(value, jax.sharding.NamedSharding):
        return tuple(mesh_of(value).devices.flat)
    return tuple(sorted(value.device_set, key=lambda device: device.id))
