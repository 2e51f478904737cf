"""A plan applied to a state: one sharding for each array, all checked before any moves.

>>> from isoshard.core.layout.mesh import make_mesh
>>> mesh = make_mesh((2, 4), ("data", "model"))
>>> state = {"kernel": jax.ShapeDtypeStruct((8, 16), "float32")}
>>> plan_state(state, mesh, ("data", "model"))["kernel"].spec
P('data', 'model')
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.axis_types import AnyMesh, retyped, same_grid
from isoshard.core.layout.leaf_paths import path_name
from isoshard.core.layout.mesh import ambient_mesh, as_mesh, is_mesh
from isoshard.core.plan import Plan
from isoshard.core.plan.model_leaves import names_of
from isoshard.core.plan.replication_warning import warn_replicated

from .graphs import is_random_state, is_variable

LEFT_OUT: Any = object()


def mesh_first(call: str, *args: Any) -> tuple[Any, ...]:
    """Arguments that begin with a mesh and a plan; the mesh may be left out under `jax.set_mesh`.

    Args:
        call: how the function is called with a mesh, for messages.
        *args: the arguments; `LEFT_OUT` at the end for one that was not passed.

    Raises:
        ShardingError: the mesh is left out, and none is set.
        TypeError: there is no plan; or the argument before a plan is not a mesh.

    Example:
        >>> with jax.set_mesh(jax.make_mesh((8,), ("x",))):
        ...     mesh, plan = mesh_first("f(mesh, plan)", P("x"), LEFT_OUT)
        >>> dict(mesh.shape), plan
        ({'x': 8}, P('x',))
    """
    mesh, *rest = args
    if mesh is not None and not is_mesh(mesh):
        if isinstance(rest[0] if rest else None, Plan | P):
            as_mesh(mesh)  # raises, with the types of a mesh
        mesh, rest = None, list(args)
    rest = [value for value in rest if value is not LEFT_OUT]
    if not rest:
        raise TypeError(f"no plan was passed; pass a plan, or one spec for all arrays: {call}")
    if mesh is None and isinstance(rest[0], NamedSharding):
        mesh = rest[0].mesh
    mesh = ambient_mesh(call) if mesh is None else as_mesh(mesh, abstract=True)
    return mesh, *rest


def plan_state(state: Any, mesh: AnyMesh, plan: Any) -> Any:
    """Choose the sharding of every array of a state.

    Args:
        state: a pytree of arrays or `jax.ShapeDtypeStruct`, such as `nnx.state(module)`.
        mesh: the mesh, or what `as_mesh` takes; it may be abstract.
        plan: a `Plan`, or one spec for every leaf. Keys and counters of `nnx.Rngs` are replicated
            whatever it says.

    Raises:
        PlanError: naming every leaf that the plan does not fit.
    """
    mesh = as_mesh(mesh, abstract=True)
    plan = plan if isinstance(plan, Plan) else Plan({"*": plan})
    named = leaf_names(state)
    boxes = named_boxes(state)
    resolved = plan.resolve(boxes, mesh)
    warn_replicated(plan, resolved)
    result = resolved.shardings
    _, tree = jax.tree.flatten(state)
    return tree.unflatten([result.get(name, NamedSharding(mesh, P())) for name, _ in named])


def with_types(x: Any, mesh: Any) -> Any:
    """An array that was computed under Auto axes, on the user's mesh of the same grid.

    Args:
        x: anything; a traced value and an array on another grid are returned as they are.
        mesh: the user's mesh.

    Example:
        >>> from isoshard.core.layout.axis_types import auto
        >>> mesh = jax.make_mesh((8,), ("x",))
        >>> x = jax.device_put(jax.numpy.ones(8), NamedSharding(auto(mesh), P("x")))
        >>> jax.typeof(with_types(x, mesh))
        ShapedArray(float32[8@x])
    """
    sharding = getattr(x, "sharding", None)  # a traced value has none
    if isinstance(sharding, NamedSharding) and same_grid(sharding.mesh, mesh):
        return retyped(x, mesh)
    return x


def named_boxes(state: Any) -> dict[str, Any]:
    """List the arrays that a plan shards, in their boxes with the names of logical axes.

    Args:
        state: a pytree, such as `nnx.state(module)` or the variables of a Linen module.

    Returns:
        By name: an NNX variable or a Linen box with axis names, or a plain array. Keys and counters
        of `nnx.Rngs` are left out.

    Example:
        >>> from flax import linen
        >>> named_boxes({"a": linen.Partitioned(1.0, names=("x",)), "b": 2.0})
        {'a': Partitioned(value=1.0, names=('x',), mesh=None), 'b': 2.0}
    """
    result = {}
    for path, box in jax.tree.leaves_with_path(state, is_leaf=_is_box):
        arrays = jax.tree.leaves_with_path(box)
        if is_random_state(box):
            continue
        if len(arrays) == 1 and names_of(box) is not None:
            result[path_name(path + arrays[0][0])] = box
        else:
            result |= {path_name(path + rest): array for rest, array in arrays}
    return result


def _is_box(node: Any) -> bool:
    return is_variable(node) or names_of(node) is not None


def leaf_names(state: Any) -> list[tuple[str, bool]]:
    """List the arrays of a state.

    Args:
        state: a pytree, such as `nnx.state(module)`.

    Returns:
        The name of each array in JAX's order (paths joined by dots) and whether it belongs to
        `nnx.Rngs`.

    Example:
        >>> leaf_names({"blocks": [{"kernel": 1.0}]})
        [('blocks.0.kernel', False)]
    """
    boxes = jax.tree.leaves_with_path(state, is_leaf=is_variable)
    return [
        (path_name(path + rest), is_random_state(box))
        for path, box in boxes
        for rest, _ in jax.tree.leaves_with_path(box)
    ]
