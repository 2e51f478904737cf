"""What a step costs under given layouts, at each depth."""

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
    """What a step costs under a plan, on one device.

    Attributes:
        seconds: of a step.
        busy: of them computing, and moving bytes between memory and cores.
        collectives: seconds by axes, joined by "+" where devices talk along several at once.
        memory: bytes at the peak.
        capacity: bytes that a device has.
        depth: how it was found.
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
    """The cost of layouts, by the traced program or XLA's partitioner.

    Args:
        step: the step.
        layouts: of parameters, buffers and the batch, by name.
        mesh: that they are over.
        capacity: bytes of one device.
        outputs: of modules, by name; others are left to the partitioner.
        depth: "trace" or "partition".
        loops: whether the partitioner is to have equal layers of the step as loops.
    """
    sharding = step.resharded(layouts, mesh)
    if outputs:
        sharding = dataclasses.replace(sharding, program=constrained(sharding.program, outputs))
    program: DeviceProgram
    if depth == "trace":
        program = by_tracing(sharding)
    else:
        program = by_partitioner(for_compilers(sharding) if loops else sharding)
    result, _ = time_of(program, mesh)
    return PlanCost(
        result.overlapped, result.busy, result.collectives, program.memory.peak, capacity, depth
    )


def by_kinds(result: ChoiceCost, mesh: Mesh, capacity: int) -> PlanCost:
    """The cost of a choice in words."""
    names = mesh.axis_names
    talking = {"+".join(names[n] for n in axes): one for axes, one in result.talking.items()}
    return PlanCost(result.seconds, result.busy, talking, int(result.memory), capacity, "kinds")
