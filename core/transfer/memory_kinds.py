"""The `memory=` option: any spelling of a spec, with a memory kind.

>>> from isoshard.core.layout.mesh import make_mesh
>>> mesh = make_mesh((2, 4), ("x", "y"))
>>> in_kind(("x", None), mesh, 2, "pinned_host").memory_kind
'pinned_host'
>>> in_kind(("x", None), mesh, None, "pinned_host")             # of a module, for all it has
Plan({'*': ('x', None)}, memory={'*': 'pinned_host'})
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import NamedSharding

from isoshard.core.layout.offload import check_memory, in_memory, is_offloaded
from isoshard.core.layout.spec import named_sharding
from isoshard.core.plan import Plan
from isoshard.core.runtime._jax_internals.tracers import Tracer


def in_kind(spec: Any, mesh: Any, ndim: int | None, kind: str | None, name: str = "array") -> Any:
    """Add a memory kind to a spec or a Plan.

    Args:
        spec: any spelling of a spec, or a Plan.
        mesh: the mesh.
        ndim: rank of the array; None for a module.
        kind: the memory kind, as JAX names it; None leaves `spec` as it is.
        name: of the array, for messages.

    Returns:
        A NamedSharding for an array, a Plan for a module or of a Plan; `spec` itself without a
        memory kind.

    Raises:
        ShardingError: the spec does not fit, or the devices have no such memory.
    """
    if kind is None:
        return spec
    check_memory(mesh, kind, name=name)
    if isinstance(spec, Plan):
        factors = tuple(dataclasses.replace(factor, memory={"*": kind}) for factor in spec.factors)
        return dataclasses.replace(spec, product=factors) if spec.product else factors[0]
    if ndim is None:
        return Plan({"*": spec}, memory={"*": kind})
    return in_memory(named_sharding(spec, mesh, ndim, name=name, sums=True), kind, name=name)


def kind_of(x: Any) -> str | None:
    """The memory kind of an offloaded array or sharding, else None."""
    if isinstance(x, Tracer):
        return None
    sharding: Any = x if isinstance(x, NamedSharding) else getattr(x, "sharding", None)
    return sharding.memory_kind if is_offloaded(sharding) else None
