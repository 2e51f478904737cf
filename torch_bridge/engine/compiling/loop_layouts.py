"""How a program's loops lie: the stacks they read, and what they carry and keep.

A loop over layers is to lie as the layers written out do. XLA's partitioner may choose another
layout in a loop than outside of one, so what the layouts of a plan's inputs and results say of the
values between layers (`planner/propagation/boundary_shardings.py`) is written into the loops.
"""

from __future__ import annotations

from collections.abc import Callable

from jax.sharding import NamedSharding, PartitionSpec

from isoshard.core.extensions import spread_shardings
from isoshard.core.runtime._jax_internals.jaxpr_classes import ClosedJaxpr, Var
from isoshard.torch_bridge.engine.values import layout_numbers
from isoshard.torch_bridge.engine.values.common_mesh import refined

from .execution_plan import CompileRequest
from .plan_lowering import layouts_in

Borders = Callable[[ClosedJaxpr], dict[Var, NamedSharding]]
"""Gives layouts of the variables of a program that computes what a plan does."""


def border_layouts(plan: CompileRequest) -> Borders | None:
    """How the values of a plan lie as it is written.

    Args:
        plan: being traced.

    Returns:
        None where nothing is laid out over several devices, or not all of it on one mesh.
    """
    named = [_named(number) for number in layouts_in(plan)]
    meshes = {None if one is None else one.mesh for one in named}
    mesh = meshes.pop() if len(meshes) == 1 else None
    if mesh is None or mesh.size == 1:
        return None
    whole = NamedSharding(mesh, PartitionSpec())
    inputs = [*map(_named, plan.placed), *[whole] * (plan.lifted + plan.draws)]
    results = [*map(_named, plan.wanted)]
    return lambda program: spread_shardings(program, mesh, inputs, results)


def _named(number: int) -> NamedSharding | None:
    """A layout in the axes of the mesh of the program being traced."""
    if number == layout_numbers.UNPLACED:
        return None
    found = layout_numbers.sharding(refined(number))
    return found if isinstance(found, NamedSharding) else None


def stacked_layout(placed: int) -> int:
    """The layout of a stack of arrays that have a layout each: its leading axis is whole.

    Args:
        placed: a number of a layout without padding, or `UNPLACED`.
    """
    found = None if placed == layout_numbers.UNPLACED else layout_numbers.layout(placed)
    if not isinstance(found, NamedSharding):
        return placed
    spec = PartitionSpec(None, *found.spec)
    return layout_numbers.intern(NamedSharding(found.mesh, spec, memory_kind=found.memory_kind))
