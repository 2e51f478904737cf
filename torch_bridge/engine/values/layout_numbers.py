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
knows by: that is what users see, and what results are handed out in.

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

from isoshard.core.domain import BlockLayout
from isoshard.core.layout.axis_types import auto, is_typed, on_mesh, same_grid
from isoshard.core.layout.mesh import mesh_of
from isoshard.core.layout.offload import is_offloaded, on_device
from isoshard.core.layout.partial_sums import stored
from isoshard.core.layout.virtual_devices import Device

UNPLACED = -1
"""The layout of a value that may be placed wherever a program needs it."""

Layout = jax.sharding.Sharding | BlockLayout

_LAYOUTS: list[Layout] = []
_NAMED: list[Layout] = []
_NUMBERS: dict[Layout, int] = {}
_GROUPS: list[tuple[Device, ...]] = []
_REPLICATED: dict[int, int] = {}
_NUMBERING = threading.Lock()


@functools.cache
def intern(layout: Layout) -> int:
    """The number of a layout; equal ones have equal numbers."""
    with _NUMBERING:
        number = _NUMBERS.get(layout)  # another thread may ask at the same time
        if number is None:
            number = _NUMBERS[layout] = len(_LAYOUTS)
            _GROUPS.append(_assignment(layout))
            _LAYOUTS.append(_under_auto(layout))
            _NAMED.append(stored(layout))  # a reduced axis is one of copies
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


def typed(number: int, mesh: Any) -> int:
    """The number of the same layout on a mesh of the same grid; None keeps the number."""
    found = None if number == UNPLACED else sharding(number)
    if mesh is None or not isinstance(found, jax.sharding.NamedSharding):
        return number
    if not same_grid(found.mesh, mesh):
        return number
    blocks, same = _LAYOUTS[number], on_mesh(found, mesh)
    return intern(blocks.on(same) if isinstance(blocks, BlockLayout) else same)


def typed_mesh(number: int) -> Mesh | None:
    """The mesh of a layout, if it has Explicit axes."""
    found: Any = None if number == UNPLACED else _NAMED[number]
    if found is None or found is _LAYOUTS[number]:
        return None
    return mesh_of(found.sharding if isinstance(found, BlockLayout) else found)


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
            whole = jax.sharding.NamedSharding(like.mesh, jax.sharding.PartitionSpec())
        else:
            whole = like
        found = _REPLICATED[number] = intern(whole)
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
