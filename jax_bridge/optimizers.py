"""Optimizer state sharded like its parameters, and created sharded.

>>> import jax.numpy as jnp, optax
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> from isoshard.core.plan import Plan
>>> mesh, plan = make_mesh((2, 4), ("data", "model")), Plan({"w": (None, "model")})
>>> params = shard({"w": jnp.ones((8, 16))}, mesh, plan)
>>> state = create_opt_state(optax.adam(1e-3), params, mesh, plan)
>>> state[0].mu["w"].sharding.spec, state[0].count.sharding.spec
(P(None, 'model'), P())

A slot belongs to the parameter whose name ends its own and whose shape it has. It is sharded as the
parameter, unless a rule of the plan is for slots (ZeRO-1: `Plan({"*.mu.*": P("data"), "*": None})`;
see `isoshard.core.plan.slot_rules`), and rests in the same memory, unless the plan's `memory` says
another. Other arrays (those of factored optimizers,
for instance) follow the plan's default and its limit for replication; step counters and other
single numbers are replicated.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.leaf_paths import named_leaves
from isoshard.core.layout.mesh import as_mesh
from isoshard.core.layout.offload import in_memory
from isoshard.core.plan import Plan
from isoshard.core.plan.memory_rules import check_used
from isoshard.core.plan.model_leaves import leaves_of
from isoshard.core.plan.slot_rules import slot_layouts

from .create import create_in_shards
from .graphs import is_nnx
from .layout import LEFT_OUT, mesh_first, named_boxes, plan_state


def create_opt_state(tx: Any, params: Any, mesh: Any = LEFT_OUT, plan: Any = LEFT_OUT) -> Any:
    """Create the state of an optax optimizer, each array directly in its shards.

    Args:
        tx: the optimizer, an `optax.GradientTransformation`.
        params: the parameters, a pytree of arrays (an `nnx.State` is one), sharded or not.
        mesh: the mesh, of any axis types, or what `as_mesh` takes. May be left out
            (`create_opt_state(tx, params, plan)`) where `jax.set_mesh` has set one.
        plan: the `Plan` of the parameters, or one spec for all.

    Returns:
        What `tx.init(params)` returns, each slot sharded as its parameter or by a rule for slots.

    Raises:
        PlanError: the plan does not fit, or leaves an array without a rule that is too large to
            be replicated.

    Example:
        >>> import optax
        >>> params, mesh = {"w": jax.numpy.ones((8, 16))}, jax.make_mesh((8,), ("x",))
        >>> state = create_opt_state(optax.adam(1e-3), params, mesh, Plan({"w": ("x",)}))
        >>> state[0].nu["w"].sharding.spec
        P('x',)
    """
    mesh, plan = mesh_first("create_opt_state(tx, params, mesh, plan)", mesh, plan)
    mesh = as_mesh(mesh)
    return create_in_shards(
        tx.init, lambda shapes: opt_state_layouts(shapes, params, mesh, plan), params
    )


def create_optimizer(
    model: Any, tx: Any, mesh: Any = LEFT_OUT, plan: Any = LEFT_OUT, *, wrt: Any = None
) -> Any:
    """Create an `nnx.Optimizer` whose state is created directly in its shards.

    Args:
        model: an NNX module, sharded or not.
        tx: the optimizer, an `optax.GradientTransformation`.
        mesh: the mesh, of any axis types, or what `as_mesh` takes. May be left out
            (`create_optimizer(model, tx, plan)`) where `jax.set_mesh` has set one.
        plan: the `Plan` of the model's parameters, or one spec for all.
        wrt: the NNX filter of what is trained, by default `nnx.Param`.

    Returns:
        The optimizer, to be used as `optimizer.update(model, grads)`.

    Raises:
        PlanError: as `create_opt_state`.
        TypeError: `model` is no NNX module.

    Example:
        >>> import optax
        >>> from flax import nnx
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> mesh = make_mesh((8,), ("x",))
        >>> optimizer = create_optimizer(
        ...     nnx.Linear(8, 16, rngs=nnx.Rngs(0)), optax.adam(1e-3), mesh, Plan({"*": ("x",)}))
        >>> optimizer.opt_state[0].mu["kernel"].sharding.spec
        P('x',)
    """
    if not is_nnx(model):
        raise TypeError(
            f"create_optimizer takes an NNX module, not a {type(model).__name__}; for a pytree of "
            "parameters use create_opt_state(tx, params, mesh, plan)"
        )
    mesh, plan = mesh_first("create_optimizer(model, tx, mesh, plan)", mesh, plan)
    nnx, mesh = sys.modules["flax.nnx"], as_mesh(mesh)
    wrt = nnx.Param if wrt is None else wrt
    model_graph, params, rest = nnx.split(model, wrt, ...)
    graph = None

    def state_of(params: Any, rest: Any) -> Any:
        nonlocal graph
        model = nnx.merge(model_graph, params, rest)
        graph, state = nnx.split(nnx.Optimizer(model, tx, wrt=wrt))
        return state

    def layouts(shapes: Any) -> Any:
        return opt_state_layouts(shapes, params, mesh, plan)

    state = create_in_shards(state_of, layouts, params, rest)
    return nnx.merge(graph, state)


def opt_state_layouts(state: Any, params: Any, mesh: Mesh, plan: Any) -> Any:
    """Choose the sharding of every array of an optimizer's state.

    Args:
        state: the state, as arrays or `jax.ShapeDtypeStruct`.
        params: the parameters.
        mesh: the mesh, or what `as_mesh` takes; it may be abstract.
        plan: the `Plan` of the parameters, or one spec for all.

    Raises:
        PlanError: as `create_opt_state`; or a rule does not fit a slot, or a memory rule of the
            plan matches nothing.
    """
    mesh = as_mesh(mesh, abstract=True)
    plan = plan if isinstance(plan, Plan) else Plan({"*": plan})
    shapes = {name: tuple(param.shape) for name, param in named_leaves(params)}
    layouts = dict(named_leaves(plan_state(params, mesh, plan)))
    replicated = NamedSharding(mesh, P())
    parameters = {leaf.name: leaf for leaf in leaves_of(named_boxes(params))}
    result, others, slots = {}, {}, {}
    for name, leaf in named_leaves(state):
        owner = _owner(name, shapes)
        follows = bool(owner) and leaf.shape == shapes[owner]
        if leaf.ndim:
            [slot] = leaves_of({name: leaf})
            slots[slot] = parameters.get(owner) if follows else None
        if follows:
            result[name] = layouts[owner]
        elif leaf.ndim:
            others[name] = leaf
    ruled = slot_layouts(plan, slots, list(parameters.values()), mesh)
    others = {name: leaf for name, leaf in others.items() if name not in ruled}
    rest = Plan(default=plan.default, replicate_below=plan.replicate_below)
    result |= rest.resolve(others, mesh).shardings | ruled
    names = [name for name, _ in named_leaves(state)]
    check_used((factor.memory for factor in plan.factors), [*shapes, *names])
    return jax.tree.structure(state).unflatten(
        in_memory(result.get(name, replicated), plan.memory_for(name), name=name) for name in names
    )


def _owner(slot: str, params: Any) -> str:
    """The longest name of a parameter that ends the name of a slot; "" if there is none."""
    keys = slot.split(".")
    tails = (".".join(keys[start:]) for start in range(len(keys)))
    return next((tail for tail in tails if tail in params), "")
