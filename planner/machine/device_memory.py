"""How much memory a device has for a step."""

from __future__ import annotations

from jax.sharding import Mesh

from .topologies import topology_of


def device_memory(mesh: Mesh, memory: object = None) -> int:
    """The bytes that one device may use: those given, else those of its chip.

    Args:
        mesh: over devices that are here or described.
        memory: bytes; None for the chip's.

    Raises:
        ValueError: `memory` is no number of bytes.

    >>> from .topologies import topology
    >>> mesh = topology("v5e:2x4").mesh((8,), ("data",))
    >>> device_memory(mesh), device_memory(mesh, 8 * 10**9)
    (16000000000, 8000000000)
    """
    if memory is None:
        return topology_of(mesh).chip.memory
    if isinstance(memory, bool) or not isinstance(memory, int | float) or not memory > 0:
        raise ValueError(
            f"memory= is the bytes that one device may use, such as 16 * 10**9, not {memory!r}; "
            "leave it out for what the chip has"
        )
    return int(memory)
