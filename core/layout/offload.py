"""Offload: data that rests in another memory of its devices than the one they compute in.

A device computes in its own memory (`"device"`). It can also read and write memory of its host
(`"pinned_host"`), where there is more room: for optimizer state, say, which a step reads and writes
once. A layout says the memory as its `memory_kind`, as in JAX; so does the type of an array:

>>> from jax.sharding import PartitionSpec as P
>>> mesh = jax.make_mesh((8,), ("x",))
>>> resting = in_memory(NamedSharding(mesh, P("x")), "pinned_host")
>>> x = jax.device_put(jax.numpy.ones(8), resting)
>>> jax.typeof(x)
ShapedArray(float32<host>[8@x])
>>> is_offloaded(resting), is_offloaded(on_device(resting))
(True, False)

A program brings in what it reads, computes, and puts back what is to rest again:

>>> step = jax.jit(lambda x: put_back(bring_in(x) + 1, resting), donate_argnums=0)
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
    """The same layout in a memory of its devices.

    Args:
        sharding: the layout.
        kind: as JAX names it, e.g. "pinned_host"; None leaves the layout as it is.
        name: of the array, for messages.

    Returns:
        The layout.

    Raises:
        ShardingError: the devices have no such memory.

    Example:
        >>> whole = jax.sharding.PartitionSpec()
        >>> in_memory(NamedSharding(jax.make_mesh((8,), ("x",)), whole), "disk", name="mu")
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
    """Whether a layout is in another memory than its devices compute in."""
    kind = getattr(sharding, "memory_kind", None)
    if kind in (None, "device"):
        return False
    if isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        return True
    return kind != next(iter(sharding.device_set)).default_memory().kind


def on_device(sharding: Any) -> Any:
    """The same layout in the memory that its devices compute in."""
    if not is_offloaded(sharding):
        return sharding
    return NamedSharding(sharding.mesh, sharding.spec)


def bring_in(x: Any) -> Any:
    """Inside a JAX transformation: a value in the memory that its devices compute in."""
    return jax.device_put(x, Space.Device) if is_resting(x) else x


def brought_in_after(tree: Any, before: Any) -> Any:
    """Inside a JAX transformation: a tree whose resting values are brought in after others.

    Left alone, a compiler brings them in as early as it can, and they take the memory of a device
    all the while.

    Args:
        tree: a pytree of values, some of them in the memory of the host.
        before: a pytree of what is computed first.

    Returns:
        The tree, with all its values where devices compute.
    """
    if not any(map(is_resting, jax.tree.leaves(tree))):
        return tree
    held, _ = jax.lax.optimization_barrier((tree, before))
    return jax.tree.map(bring_in, held)


def is_resting(x: Any) -> bool:
    """Inside a JAX transformation: whether a value is in another memory than devices compute in."""
    return jax.typeof(x).memory_space != Space.Device


def put_back(x: Any, sharding: Any) -> Any:
    """Inside a JAX transformation: a value in the memory that a layout says, laid out already."""
    return jax.device_put(x, Space.Host) if is_offloaded(sharding) else x
