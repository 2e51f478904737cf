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

from collections.abc import Iterable

import jax

from isoshard.core.devices import Device
from isoshard.core.mesh import mesh_of
from isoshard.torch_bridge.lowerings.conv_split import Split

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


def mesh_in(numbers: Iterable[int]) -> jax.sharding.Mesh | None:
    """The mesh over which some of these layouts split an axis; None if none does."""
    for number in numbers:
        value = _SHARDINGS[number] if number != UNPLACED else None
        if isinstance(value, jax.sharding.NamedSharding) and any(value.spec):
            return mesh_of(value)
    return None


def split_of(numbers: Iterable[int]) -> Split | None:
    """How programs with these layouts split axes behind the second; None if they do not."""
    found = None
    for number in numbers:
        value = _SHARDINGS[number] if number != UNPLACED else None
        if not isinstance(value, jax.sharding.NamedSharding) or not any(value.spec[2:]):
            continue
        used: set[str] = set()
        for entry in value.spec:
            used.update(() if entry is None else (entry,) if isinstance(entry, str) else entry)
        rest = any(size > 1 for name, size in value.mesh.shape.items() if name not in used)
        found = Split(mesh_of(value), rest or (found is not None and found.partly))
    return found
