"""A traced program on an abstract mesh, so that it can be exported for devices that are not here.

Tracing puts layouts over the mesh that the caller named into the program. Lowering asks the devices
of such a mesh for their client, which described devices have not; an abstract mesh has none to ask.

>>> import jax, jax.numpy as jnp
>>> from isoshard.core.planner.machine.topologies import topology
>>> mesh = topology("v5e:2x4").mesh((2, 4), ("x", "y"))
>>> row = NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
>>> laid = lambda x: jax.lax.with_sharding_constraint(jnp.sin(x), row)
>>> traced = jax.make_jaxpr(laid)(jnp.ones(8))
>>> on_abstract_mesh(traced).eqns[-1].params["sharding"].mesh is mesh.abstract_mesh
True
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import Mesh, NamedSharding


def on_abstract_mesh(program: Any) -> Any:
    """The same jaxpr with abstract meshes in all layouts and `shard_map`s, at any depth.

    Args:
        program: a jaxpr, closed or not.

    Returns:
        A jaxpr of the same kind; nothing of the one given changes.
    """
    return _changed(program)


def _changed(value: Any) -> Any:
    if isinstance(value, Mesh):
        return value.abstract_mesh
    if isinstance(value, NamedSharding):
        if not isinstance(value.mesh, Mesh):
            return value
        return NamedSharding(value.mesh.abstract_mesh, value.spec, memory_kind=value.memory_kind)
    if isinstance(value, ClosedJaxpr):
        inner = _changed(value.jaxpr)
        return value if inner is value.jaxpr else value.replace(jaxpr=inner)
    if isinstance(value, Jaxpr):
        equations = [_equation(one) for one in value.eqns]
        if all(new is old for new, old in zip(equations, value.eqns, strict=True)):
            return value
        return value.replace(eqns=equations)
    if type(value) in (tuple, list):
        items = [_changed(one) for one in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(items)
    return value


def _equation(equation: Any) -> Any:
    params = {name: _changed(value) for name, value in equation.params.items()}
    if all(params[name] is value for name, value in equation.params.items()):
        return equation
    return equation.replace(params=params)
