"""Verbs on arrays in blocks of unequal sizes, which `core/domain` implements.

`domain` imports this package, so it cannot be imported here: the top-level package registers a
loader, which runs at the first such array.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from jax.sharding import Mesh, NamedSharding

from isoshard.core.layout.uneven import UnevenArray


class BlockVerbs(Protocol):
    """The interface of `core.blocks.verbs_of_core`."""

    def shard_padded(
        self, x: Any, mesh: Mesh, spec: Any, sizes: Any, copy: bool | None, name: str | None
    ) -> Any:
        """Shard with padding; every leaf is checked before any is put on devices."""
        ...

    def reshard_uneven(self, u: UnevenArray, spec: Any, mesh: Mesh | None) -> Any:
        """Reshard; block sizes are kept where the number of blocks is."""
        ...

    def gather(self, u: UnevenArray, sharding: NamedSharding) -> Any:
        """The array of the true shape, replicated."""
        ...


def _not_wired() -> BlockVerbs:
    raise RuntimeError("import isoshard before isoshard.core.transfer")


class _Wiring:
    """The loader of the verbs; set once, by the top-level package."""

    def __init__(self) -> None:
        self.load: Callable[[], Any] = _not_wired


_WIRING = _Wiring()


def wire(load: Callable[[], Any]) -> None:
    """Register the loader of the verbs."""
    _WIRING.load = load
    block_verbs.cache_clear()


@functools.cache
def block_verbs() -> BlockVerbs:
    """The verbs, loaded at the first call."""
    return _WIRING.load()
