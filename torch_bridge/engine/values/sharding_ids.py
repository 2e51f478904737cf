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
returns: that is what users see, and what results are handed out in. So has one whose program ran
over a finer mesh, as it read tensors on other meshes as well (`common_mesh`): see `restated_on`.

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
_IDS: dict[tuple[Layout, Layout], int] = {}
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
        layout_id = _IDS.get((computed, named))  # another thread may call at the same time
        if layout_id is None:
            layout_id = _IDS[computed, named] = len(_LAYOUTS)
            _GROUPS.append(_assignment(named))
            _LAYOUTS.append(computed)
            _NAMED.append(stored(named))  # a reduced axis is one of copies
    return layout_id


def layout(layout_id: int) -> Layout:
    """The layout behind a number, under Auto axes: a sharding, or blocks with padding."""
    return _LAYOUTS[layout_id]


def as_named(layout_id: int) -> Layout:
    """The layout behind a number on the mesh of whoever named it."""
    return _NAMED[layout_id]


def untyped(layout_id: int) -> int:
    """The number of the same layout under Auto axes."""
    if layout_id == UNPLACED or _NAMED[layout_id] is _LAYOUTS[layout_id]:
        return layout_id
    return intern(_LAYOUTS[layout_id])


def computed_as(layout: Layout, layout_id: int) -> int:
    """The number of a layout that users see as they do that of another number."""
    return _numbered(layout, _NAMED[layout_id])


def restated_on(layout_id: int, mesh: Mesh | None) -> int:
    """The number of the same layout as users see it on another mesh of the same devices.

    Args:
        layout_id: of a layout.
        mesh: may be None, or have none of its axes; then the id is returned.

    >>> from isoshard import P, make_mesh
    >>> mesh, fine = make_mesh((8,), ("x",)), make_mesh((2, 4), ("axis0", "axis1"))
    >>> number = intern(jax.sharding.NamedSharding(fine, P(("axis0", "axis1"))))
    >>> seen = restated_on(number, mesh)
    >>> as_named(seen).spec, sharding(seen).spec, restated_on(seen, fine) == number
    (P('x',), P(('axis0', 'axis1'),), True)
    """
    layout = None if layout_id == UNPLACED else sharding(layout_id)
    if mesh is None or not isinstance(layout, jax.sharding.NamedSharding):
        return layout_id
    same = restated(layout, mesh)
    if same is None:
        return layout_id
    blocks = _LAYOUTS[layout_id]
    named = blocks.on(same) if isinstance(blocks, BlockLayout) else same
    return intern(named) if _under_auto(named) == blocks else _numbered(blocks, named)


@cached(4096)
def restated(layout: jax.sharding.NamedSharding, mesh: Mesh) -> jax.sharding.NamedSharding | None:
    """The same blocks on the same devices, in the axes of another mesh; None if it has none."""
    if same_grid(layout.mesh, mesh):
        return on_mesh(layout, mesh)
    try:
        return named_sharding(layout, mesh, len(layout.spec))
    except ShardingError:
        return None


def is_restated(layout_id: int) -> bool:
    """Whether users see a layout on another mesh than programs have it on."""
    return layout_id != UNPLACED and _NAMED[layout_id] is not _LAYOUTS[layout_id]


def users_mesh(layout_id: int) -> Mesh | None:
    """The mesh that users see a layout on; None if it is on none."""
    layout: Any = None if layout_id == UNPLACED else _NAMED[layout_id]
    layout = layout.sharding if isinstance(layout, BlockLayout) else layout
    return mesh_of(layout) if isinstance(layout, jax.sharding.NamedSharding) else None


def typed_mesh(layout_id: int) -> Mesh | None:
    """The mesh of a layout, if it has Explicit axes."""
    mesh = users_mesh(layout_id)
    return mesh if mesh is not None and is_typed(mesh) else None


def sharding(layout_id: int) -> jax.sharding.Sharding:
    """The sharding behind a number; of blocks with padding, that of the padded array."""
    layout = _LAYOUTS[layout_id]
    return layout.sharding if isinstance(layout, BlockLayout) else layout


def computed(layout_id: int) -> Layout:
    """The layout of a number inside a program: in the memory that the devices compute in."""
    layout = _LAYOUTS[layout_id]
    return on_device(layout) if is_offloaded(layout) else layout


def is_on_host(layout_id: int) -> bool:
    """Whether a layout is in another memory than its devices compute in."""
    return layout_id != UNPLACED and is_offloaded(_LAYOUTS[layout_id])


def blocks(layout_id: int) -> BlockLayout | None:
    """The blocks with padding behind a number; None for any other layout, and for none."""
    layout = None if layout_id == UNPLACED else _LAYOUTS[layout_id]
    return layout if isinstance(layout, BlockLayout) else None


def devices(layout_id: int) -> tuple[Device, ...]:
    """The devices of a layout, in the order in which programs number them."""
    return _GROUPS[layout_id]


def replicated_like(layout_id: int) -> int:
    """The replicated layout over the devices of another layout."""
    replicated_id = _REPLICATED.get(layout_id)
    if replicated_id is None:
        like = sharding(layout_id)
        if isinstance(like, jax.sharding.NamedSharding):
            like = jax.sharding.NamedSharding(like.mesh, jax.sharding.PartitionSpec())
        mesh, replicated = users_mesh(layout_id), intern(like)
        replicated_id = replicated if mesh is None else restated_on(replicated, auto(mesh))
        _REPLICATED[layout_id] = replicated_id
    return replicated_id


def _under_auto(layout: Layout) -> Layout:
    inner = layout.sharding if isinstance(layout, BlockLayout) else layout
    if not isinstance(inner, jax.sharding.NamedSharding) or not is_typed(inner.mesh):
        return layout
    untyped = on_mesh(inner, auto(mesh_of(inner)))
    return layout.on(untyped) if isinstance(layout, BlockLayout) else untyped


def _assignment(value: Layout) -> tuple[Device, ...]:
    if isinstance(value, BlockLayout):
        value = value.sharding
    if isinstance(value, jax.sharding.NamedSharding):
        return tuple(mesh_of(value).devices.flat)
    return tuple(sorted(value.device_set, key=lambda device: device.id))
