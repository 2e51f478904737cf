"""Offload: arrays that are stored in another memory than their devices' default.

A device computes in its own memory (`"device"`). It can also read and write memory of its host
(`"pinned_host"`), which is larger: for example for optimizer state, which a step reads and writes
once. The `memory_kind` of a sharding selects it, as in JAX, and it is part of an array's type:

>>> from jax.sharding import PartitionSpec as P
>>> mesh = jax.make_mesh((8,), ("x",))
>>> resting = in_memory(NamedSharding(mesh, P("x")), "pinned_host")
>>> x = jax.device_put(jax.numpy.ones(8), resting)
>>> jax.typeof(x)
ShapedArray(float32<host>[8@x])
>>> is_offloaded(resting), is_offloaded(on_device(resting))
(True, False)

A program copies its offloaded inputs to the device, computes, and copies results back:

>>> step = jax.jit(lambda x: to_memory_of(to_device(x) + 1, resting), donate_argnums=0)
>>> step(x).sharding.memory_kind
'pinned_host'
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from isoshard.core.errors import ShardingError
from isoshard.core.runtime._jax_internals.undocumented import Space


def in_memory(sharding: NamedSharding, kind: str | None, *, name: str = "array") -> NamedSharding:
    """The same sharding in a memory of its devices.

    Args:
        sharding: the sharding.
        kind: as JAX names it, e.g. "pinned_host"; None returns the sharding as it is.
        name: of the array, for messages.

    Raises:
        ShardingError: the devices have no such memory.

    Example:
        >>> replicated = jax.sharding.PartitionSpec()
        >>> in_memory(NamedSharding(jax.make_mesh((8,), ("x",)), replicated), "disk", name="mu")
        Traceback (most recent call last):
            ...
        isoshard.core.errors.ShardingError: mu: its devices (cpu) have no memory 'disk'; they have 'device', 'pinned_host', 'unpinned_host'. Name one of these.
    """  # noqa: E501
    if kind is None or kind == sharding.memory_kind:
        return sharding
    check_memory(sharding.mesh, kind, name=name)
    return sharding.with_memory_kind(kind)


def check_memory(mesh: Any, kind: str | None, *, name: str = "array") -> None:
    """Raise ShardingError if the devices of a mesh have no such memory; an abstract one has any."""
    if not isinstance(mesh, Mesh):
        return
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if kind not in kinds:
        raise ShardingError(
            f"{name}: its devices ({device.platform}) have no memory {kind!r}; they have "
            f"{', '.join(map(repr, kinds))}. Name one of these."
        )


def is_offloaded(sharding: Any) -> bool:
    """Whether a sharding is in another memory than its devices' default."""
    kind = getattr(sharding, "memory_kind", None)
    if kind in (None, "device"):
        return False
    if isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        return True
    return kind != next(iter(sharding.device_set)).default_memory().kind


def on_device(sharding: Any) -> Any:
    """The same sharding in its devices' default memory."""
    if not is_offloaded(sharding):
        return sharding
    return NamedSharding(sharding.mesh, sharding.spec)


def to_device(x: Any) -> Any:
    """Inside a JAX transformation: a value in its devices' default memory."""
    return jax.device_put(x, Space.Device) if is_on_host(x) else x


def to_device_after(tree: Any, before: Any) -> Any:
    """Inside a JAX transformation: a tree whose offloaded values are copied in after `before`.

    Without the barrier a compiler copies them as early as it can, and they occupy device memory
    until their use.
    """
    if not any(map(is_on_host, jax.tree.leaves(tree))):
        return tree
    ordered, _ = jax.lax.optimization_barrier((tree, before))
    return jax.tree.map(to_device, ordered)


def is_on_host(x: Any) -> bool:
    """Inside a JAX transformation: whether a value is in another memory than its devices'."""
    return jax.typeof(x).memory_space != Space.Device


def to_memory_of(x: Any, sharding: Any) -> Any:
    """Inside a JAX transformation: a value in the memory kind of a sharding that it already has."""
    return jax.device_put(x, Space.Host) if is_offloaded(sharding) else x
