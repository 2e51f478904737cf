"""A traced program on an abstract mesh, so that it can be exported for devices that are not here.

Tracing puts layouts over the mesh that the caller named into the program. Lowering asks the devices
of such a mesh for their client, which described devices have not; an abstract mesh has none to ask.

>>> import jax, jax.numpy as jnp
>>> from isoshard.planner.machine.topologies import topology
>>> mesh = topology("v5e:2x4").mesh((2, 4), ("x", "y"))
>>> row = NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
>>> laid = lambda x: jax.lax.with_sharding_constraint(jnp.sin(x), row)
>>> traced = jax.make_jaxpr(laid)(jnp.ones(8))
>>> on_abstract_mesh(traced).eqns[-1].params["sharding"].mesh is mesh.abstract_mesh
True
"""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh, NamedSharding

from isoshard.core.runtime.jaxprs import JaxprRewriter


def on_abstract_mesh(program: Any) -> Any:
    """The same jaxpr with abstract meshes in all layouts and `shard_map`s, at any depth.

    Args:
        program: a jaxpr, closed or not.

    Returns:
        A jaxpr of the same kind; nothing of the one given changes.
    """
    return _OnAbstractMesh().program(program)


def abstract_layout(layout: NamedSharding) -> NamedSharding:
    """The same layout over the abstract mesh.

    Args:
        layout: over devices, or over an abstract mesh already.
    """
    if not isinstance(layout.mesh, Mesh):
        return layout
    return NamedSharding(layout.mesh.abstract_mesh, layout.spec, memory_kind=layout.memory_kind)


class _OnAbstractMesh(JaxprRewriter):
    def value(self, value: Any, context: Any) -> Any:
        if isinstance(value, Mesh):
            return value.abstract_mesh
        if isinstance(value, NamedSharding):
            return abstract_layout(value)
        return super().value(value, context)
