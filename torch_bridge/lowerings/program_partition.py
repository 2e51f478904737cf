"""How the program being compiled is split over devices.

Some operations need another lowering where XLA partitions their arrays. The engine declares
a program's shardings with `compiling_for`, and a lowering reads `partition()`.

>>> from isoshard import P, make_mesh
>>> images = NamedSharding(make_mesh((2, 4), ("x", "y")), P(None, None, "y"))
>>> with compiling_for([images]):
...     partition().images, partition().partly
(True, True)
>>> partition().mesh is None                     # nothing is being compiled
True
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, Sharding

from isoshard.core.layout.mesh import mesh_of
from isoshard.core.layout.spec import axis_names


class Partition(NamedTuple):
    """How a program's arrays are sharded.

    Attributes:
        mesh: over these devices; None if no axis is split. Where a program names several meshes,
            they have the same devices in the same order, and this is one of them.
        images: whether an axis behind the second is split, as that of an image in space.
        partly: whether that is so over a part of the devices only, the others being left out or
            used for the second axis, the channels of an image.
        replicated: whether the program splits no array. False where undeclared, as in a
            function of JAX's.
    """

    mesh: Mesh | None = None
    images: bool = False
    partly: bool = False
    replicated: bool = False


_NOT_SPLIT = Partition()
_PARTITION: contextvars.ContextVar[Partition] = contextvars.ContextVar(
    "partition", default=_NOT_SPLIT
)


_PLATFORM: contextvars.ContextVar[str] = contextvars.ContextVar("platform", default="")


@contextlib.contextmanager
def compiling_for(layouts: Iterable[Sharding], platform: str = "") -> Iterator[None]:
    """Declare the shardings of the program that is compiled, and the platform of its devices."""
    tokens = _PARTITION.set(_merged(layouts)), _PLATFORM.set(platform)
    try:
        yield
    finally:
        _PARTITION.reset(tokens[0])
        _PLATFORM.reset(tokens[1])


def target_platform() -> str:
    """The platform of the program being compiled: "cpu", "gpu", "tpu"; by default JAX's own."""
    return _PLATFORM.get() or jax.default_backend()


def partition() -> Partition:
    """How the program being compiled is split; inside `jax.shard_map` arrays are shards already."""
    return _NOT_SPLIT if jax.sharding.get_abstract_mesh().manual_axes else _PARTITION.get()


def _merged(layouts: Iterable[Sharding]) -> Partition:
    split = [s for s in layouts if isinstance(s, NamedSharding) and any(s.spec)]
    images = [s for s in split if any(s.spec[2:])]
    partly = any(map(_leaves_devices_out, images))
    return Partition(mesh_of(split[0]) if split else None, bool(images), partly, not split)


def _leaves_devices_out(layout: NamedSharding) -> bool:
    used = {name for entry in (*layout.spec[:1], *layout.spec[2:]) for name in axis_names(entry)}
    return any(size > 1 for name, size in layout.mesh.shape.items() if name not in used)
