"""Shardings of a program's loops: of the stacks they read, and of what they carry and save.

A loop over layers is to be sharded as the unrolled layers. XLA's partitioner may choose another
layout in a loop than outside of one, so what the layouts of a plan's inputs and results say of the
values between layers (`planner/propagation/boundary_shardings.py`) is written into the loops.
"""

from __future__ import annotations

from collections.abc import Callable

from jax.sharding import NamedSharding, PartitionSpec

from isoshard.core.extensions import spread_shardings
from isoshard.core.layout.spec import stacked_sharding
from isoshard.core.runtime._jax_internals.jaxpr_classes import ClosedJaxpr, Var
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.engine.values.common_mesh import refined

from .compile_request import CompileRequest
from .plan_lowering import layouts_in

Borders = Callable[[ClosedJaxpr], dict[Var, NamedSharding]]
"""Gives layouts of the variables of a program that computes what a plan does."""


def boundary_layouts(plan: CompileRequest) -> Borders | None:
    """The shardings of a plan's values before layers become loops.

    Returns:
        None where nothing is sharded over several devices, or not all of it on one mesh.
    """
    named = [_named(layout) for layout in layouts_in(plan)]
    meshes = {None if sharding is None else sharding.mesh for sharding in named}
    mesh = meshes.pop() if len(meshes) == 1 else None
    if mesh is None or mesh.size == 1:
        return None
    sharding = NamedSharding(mesh, PartitionSpec())
    inputs = [*map(_named, plan.placed), *[sharding] * (plan.lifted + plan.draws)]
    results = [*map(_named, plan.result_layouts)]
    return lambda program: spread_shardings(program, mesh, inputs, results)


def _named(layout_id: int) -> NamedSharding | None:
    """A layout in the axes of the mesh of the program being traced."""
    if layout_id == sharding_ids.UNPLACED:
        return None
    sharding = sharding_ids.sharding(refined(layout_id))
    return sharding if isinstance(sharding, NamedSharding) else None


def stacked_layout(placed: int) -> int:
    """The layout of a stack of arrays of one layout: its leading axis is unsharded.

    Args:
        placed: a number of a layout without padding, or `UNPLACED`.
    """
    result = None if placed == sharding_ids.UNPLACED else sharding_ids.layout(placed)
    if not isinstance(result, NamedSharding):
        return placed
    return sharding_ids.intern(stacked_sharding(result))
