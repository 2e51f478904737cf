"""A traced program for one platform, on an abstract mesh, so that it can be exported.

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

`jax.lax.platform_dependent` puts every branch into the program and lowering drops those of other
platforms. What counts flops and memory before that has to drop them itself.

>>> import jax
>>> def step(x):
...     return jax.lax.platform_dependent(x, cpu=jax.numpy.sin, default=lambda x: x * 2)
>>> program = jax.make_jaxpr(step)(1.0)
>>> [one.primitive.name for one in program.eqns]
['platform_index', 'cond']
>>> call = for_platform(program, "tpu").eqns[-1]
>>> call.params["call_jaxpr"].eqns[0].primitive.name
'mul'
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.sharding import Mesh, NamedSharding

from isoshard.core.kit import JaxprRewriter, closed_call_p


def on_abstract_mesh(program: Any) -> Any:
    """The same jaxpr with abstract meshes in all layouts and `shard_map`s, at any depth.

    Returns:
        A jaxpr of the same kind; nothing of the one given changes.
    """
    return _OnAbstractMesh().program(program)


def abstract_layout(layout: NamedSharding) -> NamedSharding:
    """The same layout over the abstract mesh."""
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


_LOWERED = {"gpu": "cuda"}
"""What JAX calls a platform where it lowers for it, if not as a device does."""


def for_platform(program: Any, platform: str) -> Any:
    """The same jaxpr with one branch of what depends on the platform, at any depth.

    Returns:
        A jaxpr of the same kind, which calls the branch. What has none for the platform stays, and
        says so when it is lowered. Nothing of the one given changes.
    """
    return _OneBranch(_LOWERED.get(platform, platform)).program(program)


class _OneBranch(JaxprRewriter):
    def __init__(self, platform: str) -> None:
        super().__init__()
        self._platform = platform

    def equation(self, eqn: Any, context: Any) -> Iterator[Any]:
        eqn = self.inside(eqn, context)
        if eqn.primitive.name == "cond":
            params = eqn.params
            platforms = params.get("branches_platforms") or ()
            for branch, names in zip(params["branches"], platforms, strict=bool(platforms)):
                if names is None or self._platform in names:
                    yield eqn.replace(
                        primitive=closed_call_p,
                        invars=eqn.invars[1:],
                        params={"call_jaxpr": branch},
                        effects=branch.effects,
                    )
                    return
        yield eqn
