"""Shardings as small integers.

Hashing a `NamedSharding` costs a microsecond, and a training step has hundreds of them. Each
distinct layout is interned once; from then on the engine compares and hashes integers.

>>> from isoshard import P, make_mesh
>>> mesh = make_mesh((8,), ("x",))
>>> number = intern(jax.sharding.NamedSharding(mesh, P("x")))
>>> number == intern(jax.sharding.NamedSharding(mesh, P("x")))
True
>>> sharding(number).spec
P('x',)
"""

from __future__ import annotations

import jax

from isoshard.core.devices import Device
from isoshard.core.mesh import mesh_of

UNPLACED = -1
"""The layout of a value that may be placed wherever a program needs it."""

_SHARDINGS: list[jax.sharding.Sharding] = []
_NUMBERS: dict[jax.sharding.Sharding, int] = {}
_GROUPS: list[tuple[Device, ...]] = []
_REPLICATED: dict[int, int] = {}


def intern(sharding: jax.sharding.Sharding) -> int:
    """The number of `sharding`; equal shardings have equal numbers."""
    number = _NUMBERS.get(sharding)
    if number is None:
        number = _NUMBERS[sharding] = len(_SHARDINGS)
        _SHARDINGS.append(sharding)
        _GROUPS.append(_assignment(sharding))
    return number


def sharding(number: int) -> jax.sharding.Sharding:
    """The sharding behind a number."""
    return _SHARDINGS[number]


def devices(number: int) -> tuple[Device, ...]:
    """The devices of a layout, in the order in which programs number them."""
    return _GROUPS[number]


def replicated_like(number: int) -> int:
    """The layout that keeps a whole copy on every device of another layout."""
    found = _REPLICATED.get(number)
    if found is None:
        like = _SHARDINGS[number]
        if isinstance(like, jax.sharding.NamedSharding):
            whole = jax.sharding.NamedSharding(like.mesh, jax.sharding.PartitionSpec())
        else:
            whole = like
        found = _REPLICATED[number] = intern(whole)
    return found


def _assignment(value: jax.sharding.Sharding) -> tuple[Device, ...]:
    if isinstance(value, jax.sharding.NamedSharding):
        return tuple(mesh_of(value).devices.flat)
    return tuple(sorted(value.device_set, key=lambda device: device.id))
