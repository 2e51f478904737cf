"""Equinox modules under the verbs of isoshard: `shard`, `reshard`, `full`, `sharding_of`, `to_jax`.

An Equinox module is a pytree some of whose leaves are no arrays: activation functions, numbers,
strings. Those remain as they are. A module is a value: a new one is returned, and the plan's rules
match names such as `layers.0.weight`.

Modules with such leaves inside of a container are not supported: shard each by itself.

    model = iso.shard(eqx.nn.MLP(8, 8, 64, 2, key=key), mesh, iso.Plan({"layers.*": P("model")}))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from isoshard.core.checkpoint.source import Entry, NamedState
from isoshard.core.frameworks import Framework, register
from isoshard.core.layout.leaf_paths import named_leaves
from isoshard.core.transfer import device_put, exchange

from . import module_state
from .graphs import is_equinox, join, split


class Equinox(Framework):
    """Core's verbs for Equinox modules."""

    name = "equinox"

    def owns(self, obj: Any) -> bool:
        """Modules; the arrays in them are JAX's."""
        return is_equinox(obj)

    def shard(
        self, x: Any, mesh: Mesh, spec: Any, *, copy: bool | None = None, name: str | None = None
    ) -> Any:
        """The module with every array sharded; `spec` is a Plan, one spec, or specs by name."""
        return _changed(
            x, lambda arrays: device_put.shard(arrays, mesh, spec, copy=copy, name=name)
        )

    def reshard(self, x: Any, mesh: Mesh | None, spec: Any) -> Any:
        """The module with another sharding, by default on the mesh it is on."""
        return _changed(x, lambda arrays: device_put.reshard(arrays, mesh, spec))

    def full(self, x: Any) -> Any:
        """The module with every array replicated."""
        return _changed(x, device_put.full)

    def named_arrays(self, x: Any) -> dict[str, Any]:
        """The arrays by name."""
        return _arrays(x)

    def elements(self, x: Any) -> dict[str, Any]:
        """The arrays by name."""
        return _arrays(x)

    def sharding_of(self, x: Any) -> dict[str, NamedSharding]:
        """The sharding of each array, by name."""
        return device_put.sharding_of(_arrays(x))

    def to_jax(
        self,
        x: Any,
        sharding: NamedSharding | None = None,
        *,
        copy: bool | None = None,
        name: str = "",
    ) -> dict[str, jax.Array]:
        """The arrays by name."""
        return exchange.to_jax(_arrays(x), sharding, copy=copy)

    def parts(self, x: Any, saved: Mapping[str, Entry] | None = None) -> dict[str, NamedState]:
        """See `module_state.parts_of`."""
        return module_state.parts_of(x)

    def filled(self, x: Any, values: dict[str, Any]) -> Any:
        """See `module_state.filled`."""
        return module_state.filled(x, values)


def _arrays(module: Any) -> dict[str, Any]:
    return dict(named_leaves(split(module)[1]))


def _changed(module: Any, change: Any) -> Any:
    graph, state = split(module)
    changed = change(_arrays(module))
    names = [name for name, _ in named_leaves(state)]
    state = jax.tree.structure(state).unflatten(changed[name] for name in names)
    return join(graph, state)


register(Equinox())
