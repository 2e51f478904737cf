"""The cost of a step for shardings of its inputs, at each depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from jax.sharding import Mesh, NamedSharding

from isoshard.core.kit import TracedStep

from ..costs.device_program import DeviceProgram
from ..costs.roofline import time_of
from ..programs.compiling import by_partitioner
from ..propagation.boundary_shardings import for_compilers
from ..propagation.trace_depth import by_tracing
from .analytic_cost import ChoiceCost
from .constrained_step import constrained

SearchDepth = Literal["kinds", "trace", "partition"]
"""How a plan is evaluated: by kinds of operations alone; by the traced program; by XLA's
partitioner."""


@dataclasses.dataclass(frozen=True)
class PlanCost:
    """The cost of a step under a plan, on one device.

    Attributes:
        seconds: of a step.
        busy: seconds of computing, and of moving bytes between memory and cores.
        collectives: seconds by mesh axes; "+" joins the axes of one collective.
        memory: bytes at the peak.
        capacity: bytes that a device has.
        depth: how it was estimated.
    """

    seconds: float
    busy: float
    collectives: Mapping[str, float]
    memory: int
    capacity: int
    depth: SearchDepth

    @property
    def fits(self) -> bool:
        """Whether one device has the memory."""
        return self.memory <= self.capacity


def cost_of(
    step: TracedStep,
    layouts: Mapping[str, NamedSharding],
    mesh: Mesh,
    capacity: int,
    *,
    outputs: Mapping[str, NamedSharding] | None = None,
    depth: SearchDepth = "trace",
    loops: bool = False,
) -> PlanCost:
    """The cost of shardings, by the traced program or XLA's partitioner.

    Args:
        step: the step.
        layouts: of parameters, buffers and the batch, by name.
        mesh: of the shardings.
        capacity: bytes of one device.
        outputs: of modules, by name; others are left to the partitioner.
        depth: "trace" or "partition".
        loops: whether the partitioner gets equal layers of the step as loops.
    """
    planned = step.resharded(layouts, mesh)
    if outputs:
        planned = dataclasses.replace(planned, program=constrained(planned.program, outputs))
    program: DeviceProgram
    if depth == "trace":
        program = by_tracing(planned, kernels=False)
    else:
        program = by_partitioner(for_compilers(planned) if loops else planned)
    time, _ = time_of(program, mesh)
    return PlanCost(
        time.overlapped, time.busy, time.collectives, program.memory.peak, capacity, depth
    )


def by_kinds(cost: ChoiceCost, mesh: Mesh, capacity: int) -> PlanCost:
    """The cost of a choice by kinds, with the names of mesh axes."""
    names = mesh.axis_names
    collectives = {
        "+".join(names[n] for n in axes): seconds for axes, seconds in cost.collectives.items()
    }
    return PlanCost(cost.seconds, cost.busy, collectives, int(cost.memory), capacity, "kinds")
