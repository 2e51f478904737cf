"""Core's verbs on arrays in blocks of unequal sizes, which `iso.domain` knows how to do.

`domain` comes after this room. The facade says where its verbs are, and they are loaded when
the first such array is met.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from jax.sharding import Mesh, NamedSharding

from isoshard.core.layout.uneven import UnevenArray


class BlockVerbs(Protocol):
    """What `core.blocks.verbs_of_core` has."""

    def shard_padded(
        self, x: Any, mesh: Mesh, spec: Any, sizes: Any, copy: bool | None, name: str | None
    ) -> Any:
        """Lay out with padding; every leaf is checked before one is placed."""
        ...

    def reshard_uneven(self, u: UnevenArray, spec: Any, mesh: Mesh | None) -> Any:
        """Blocks where they are wanted, of the sizes they have where there are as many."""
        ...

    def gather(self, u: UnevenArray, sharding: NamedSharding) -> Any:
        """The array of the true shape, whole on every device."""
        ...


def _not_wired() -> BlockVerbs:
    raise RuntimeError("import isoshard before isoshard.core.transfer")


class _Wiring:
    """How the verbs are loaded; set once, by the facade."""

    def __init__(self) -> None:
        self.load: Callable[[], Any] = _not_wired


_WIRING = _Wiring()


def wire(load: Callable[[], Any]) -> None:
    """Load the verbs so, once they are needed."""
    _WIRING.load = load
    block_verbs.cache_clear()


@functools.cache
def block_verbs() -> BlockVerbs:
    """The verbs."""
    return _WIRING.load()
