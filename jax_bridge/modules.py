"""Flax NNX objects under the verbs of isoshard: `shard`, `reshard`, `full`, `sharding_of`.

>>> from flax import nnx
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.plan import Plan
>>> mesh = make_mesh((2, 4), ("data", "model"))
>>> model = nnx.Linear(16, 64, rngs=nnx.Rngs(0))
>>> shard(model, mesh, Plan({"kernel": (None, "model")})) is model
True
>>> {name: sharding.spec for name, sharding in sharding_of(model).items()}
{'bias': P(), 'kernel': P(None, 'model')}

A module or optimizer is sharded in place: every leaf is checked first, then all of them move, so
an error leaves it as it was. An `nnx.State` is a value: a new one is returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from isoshard.core.checkpoint.source import Entry, NamedState
from isoshard.core.errors import ShardingError, raise_collected
from isoshard.core.extensions import traced_flax_step
from isoshard.core.frameworks import Framework, register
from isoshard.core.layout.axis_types import AnyMesh
from isoshard.core.layout.mesh import ambient_mesh, mesh_of
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.traced.traced_step import TracedStep
from isoshard.core.transfer import device_put, exchange

from . import module_state
from .graphs import join, split
from .layout import leaf_names, named_boxes, plan_state

_KINDS = (nnx.Pytree, nnx.State, nnx.Variable)


def owns(obj: object) -> bool:
    """Tell whether `obj` is a Flax NNX object (module, optimizer, ..), state or variable."""
    return isinstance(obj, _KINDS)


def shard(model: Any, mesh: AnyMesh, plan: Any, *, copy: bool | None = None) -> Any:
    """Shard every array of an NNX object.

    Args:
        model: an `nnx.Module`, `nnx.Optimizer` or other NNX object, an `nnx.Variable`, or an
            `nnx.State`. Shared variables count once.
        mesh: the mesh, of any axis types, or what `as_mesh` takes; in a JAX transformation it may
            be abstract.
        plan: a `Plan` over names such as `blocks.0.attn.qkv.kernel`, or one spec for every leaf.
            The keys and counters of `nnx.Rngs` are replicated whatever the plan.
        copy: None moves the arrays with another sharding; True allocates new buffers for all;
            False raises if anything must move.

    Returns:
        `model` itself, sharded; of an `nnx.State`, a new one.

    Raises:
        PlanError: naming every leaf that the plan does not fit; nothing has changed.
        CopyError: `copy` is False and leaves must move; nothing has changed.
    """
    _, state = split(model)
    placed = _put(state, plan_state(state, mesh, plan), copy)
    if isinstance(model, nnx.Pytree):
        nnx.update(model, placed)
        return model
    if isinstance(model, nnx.Variable):
        model.set_value(placed[...])
        return model
    return placed


def reshard(model: Any, plan: Any) -> Any:
    """Reshard an NNX object, on the mesh it is on, else on the one of `jax.set_mesh`.

    Args:
        model: an NNX object, variable or state.
        plan: a `Plan`, or one spec for every leaf.

    Returns:
        `model` itself, sharded; of an `nnx.State`, a new one.

    Raises:
        ShardingError: it is on several meshes, or on none and none is set.
        PlanError: naming every leaf that the plan does not fit; nothing has changed.
    """
    return shard(model, _mesh_of(model), plan)


def full(model: Any) -> Any:
    """Gather an NNX object: every array is replicated.

    Args:
        model: an NNX object, state or variable.

    Returns:
        A new object of the same kind, replicated; `model` keeps its sharding.

    Raises:
        ShardingError: an array is on several devices without a mesh.
    """
    graph, state = split(model)
    names, arrays, tree = _flat(state)
    gathered = device_put.full(dict(zip(names, arrays, strict=True)))
    return join(graph, tree.unflatten(gathered[name] for name in names))


def sharding_of(model: Any) -> dict[str, NamedSharding] | NamedSharding:
    """Read the sharding of every array of an NNX object.

    Args:
        model: an NNX object, state or variable.

    Returns:
        The shardings by name, as `isoshard.sharding_of` returns them for arrays; of a variable,
        its sharding.

    Raises:
        ShardingError: an array is traced, or is on several devices without a mesh.
    """
    return _unless_variable(model, device_put.sharding_of(_arrays(model)))


def to_jax(
    model: Any, sharding: NamedSharding | None = None, *, copy: bool | None = None
) -> dict[str, jax.Array] | jax.Array:
    """List the arrays of an NNX object.

    Args:
        model: an NNX object, state or variable.
        sharding: for each of them; by default they remain as they are.
        copy: None moves what must move; True allocates new buffers; False raises if anything must
            move.

    Returns:
        The arrays by name, as in `sharding_of`; of a variable, its array.

    Raises:
        CopyError: `copy` is False and an array must move.
    """
    return _unless_variable(model, exchange.to_jax(_arrays(model), sharding, copy=copy))


class Flax(Framework):
    """The verbs of this module as core's registry of frameworks calls them."""

    name = "flax"

    def owns(self, obj: Any) -> bool:
        """See `owns`."""
        return owns(obj)

    def shard(
        self, x: Any, mesh: Mesh, spec: Any, *, copy: bool | None = None, name: str | None = None
    ) -> Any:
        """See `shard`; leaves go by their own names, so `name` is not needed."""
        return shard(x, mesh, spec, copy=copy)

    def reshard(self, x: Any, mesh: Mesh | None, spec: Any) -> Any:
        """See `reshard`."""
        return reshard(x, spec) if mesh is None else shard(x, mesh, spec)

    def full(self, x: Any) -> Any:
        """See `full`."""
        return full(x)

    def named_arrays(self, x: Any) -> dict[str, Any]:
        """The variables by name; those with logical axes have them in their metadata."""
        return named_boxes(split(x)[1])

    def elements(self, x: Any) -> dict[str, Any]:
        """The arrays by name."""
        return _arrays(x)

    def named_modules(self, x: Any) -> list[str] | None:
        """The names of the modules in a module; None for states and variables."""
        if not isinstance(x, nnx.Module):
            return None
        return [".".join(map(str, path)) for path, _ in nnx.iter_modules(x)]

    def traced_step(
        self, step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], mesh: Mesh, plan: Any
    ) -> TracedStep:
        """See `planner.flax_steps.traced_flax_step`."""
        return traced_flax_step(step, args, kwargs, mesh, plan)

    def sharding_of(self, x: Any) -> dict[str, NamedSharding] | NamedSharding:
        """See `sharding_of`."""
        return sharding_of(x)

    def to_jax(
        self,
        x: Any,
        sharding: NamedSharding | None = None,
        *,
        copy: bool | None = None,
        name: str = "",
    ) -> dict[str, jax.Array] | jax.Array:
        """See `to_jax`."""
        return to_jax(x, sharding, copy=copy)

    def parts(self, x: Any, saved: Mapping[str, Entry] | None = None) -> dict[str, NamedState]:
        """See `module_state.parts_of`."""
        return module_state.parts_of(x)

    def filled(self, x: Any, values: dict[str, Any]) -> Any:
        """See `module_state.filled`."""
        return module_state.filled(x, values)


def _flat(state: Any) -> tuple[list[str], list[Any], Any]:
    names = [name for name, _ in leaf_names(state)]
    arrays, tree = jax.tree.flatten(state)
    return names, arrays, tree


def _arrays(model: Any) -> dict[str, Any]:
    names, arrays, _ = _flat(split(model)[1])
    return dict(zip(names, arrays, strict=True))


def _unless_variable(model: Any, by_name: dict[str, Any]) -> Any:
    return next(iter(by_name.values())) if isinstance(model, nnx.Variable) else by_name


def _put(state: Any, layouts: Any, copy: bool | None) -> Any:
    """Move the arrays of a state, once all of them may."""
    names, arrays, tree = _flat(state)
    moves = list(zip(names, arrays, jax.tree.leaves(layouts), strict=True))
    errors = []
    for name, array, layout in moves:
        try:
            if not isinstance(array, Tracer):
                mesh_of(layout)
            exchange.check_shareable(array, layout, copy=copy, name=name)
        except ShardingError as error:
            errors.append(error)
    raise_collected(errors)
    return tree.unflatten(exchange.to_jax(x, to, copy=copy, name=name) for name, x, to in moves)


def _mesh_of(model: Any) -> AnyMesh:
    arrays = _arrays(model).values()
    shardings = [jax.typeof(x).sharding if isinstance(x, Tracer) else x.sharding for x in arrays]
    layouts = [
        value for value in shardings if isinstance(value, NamedSharding) and not value.mesh.empty
    ]
    meshes = {layout.mesh for layout in layouts}
    if not meshes:
        return ambient_mesh("iso.reshard(x, mesh, plan)")
    if len(meshes) != 1:
        raise ShardingError(
            f"the arrays of the {type(model).__name__} are on {len(meshes)} different meshes; pass "
            "the one to shard them over: iso.reshard(x, mesh, plan)"
        )
    return meshes.pop()


register(Flax())
