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
"""

from __future__ import annotations

import threading

import jax

from isoshard.core.devices import Device
from isoshard.core.domain import BlockLayout
from isoshard.core.mesh import mesh_of

UNPLACED = -1
"""The layout of a value that may be placed wherever a program needs it."""

Layout = jax.sharding.Sharding | BlockLayout

_LAYOUTS: list[Layout] = []
_NUMBERS: dict[Layout, int] = {}
_GROUPS: list[tuple[Device, ...]] = []
_REPLICATED: dict[int, int] = {}
_NUMBERING = threading.Lock()


def intern(layout: Layout) -> int:
    """The number of a layout; equal ones have equal numbers."""
    number = _NUMBERS.get(layout)
    if number is None:
        with _NUMBERING:
            number = _NUMBERS.get(layout)
            if number is None:
                number = len(_LAYOUTS)
                _GROUPS.append(_assignment(layout))
                _LAYOUTS.append(layout)
                _NUMBERS[layout] = number  # last: now others may find it
    return number


def layout(number: int) -> Layout:
    """The layout behind a number: a sharding, or blocks with padding."""
    return _LAYOUTS[number]


def sharding(number: int) -> jax.sharding.Sharding:
    """The sharding behind a number; of blocks with padding, that of the padded array."""
    found = _LAYOUTS[number]
    return found.sharding if isinstance(found, BlockLayout) else found


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


def _assignment(value: Layout) -> tuple[Device, ...]:
    if isinstance(value, BlockLayout):
        value = value.sharding
    if isinstance(value, jax.sharding.NamedSharding):
        return tuple(mesh_of(value).devices.flat)
    return tuple(sorted(value.device_set, key=lambda device: device.id))
