"""What a step costs under given layouts, at each depth."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Literal

from jax.sharding import Mesh, NamedSharding

from isoshard.core.traced.traced_step import TracedStep

from ..axes.border_layouts import for_compilers
from ..axes.trace_depth import by_tracing
from ..costs.device_program import DeviceProgram
from ..costs.roofline import time_of
from ..programs.compiling import by_partitioner
from .analytic_cost import AnalyticCost, Choice, ChoiceCost
from .condensed_program import CondensedProgram
from .constrained_step import constrained
from .fixed_rules import forced_layouts

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
    laid = step.laid_out(layouts, mesh)
    if outputs:
        laid = dataclasses.replace(laid, program=constrained(laid.program, outputs))
    program: DeviceProgram
    if depth == "trace":
        program = by_tracing(laid)
    else:
        program = by_partitioner(for_compilers(laid) if loops else laid)
    found, _ = time_of(program, mesh)
    return PlanCost(
        found.overlapped, found.busy, found.collectives, program.memory.peak, capacity, depth
    )


def by_kinds(found: ChoiceCost, mesh: Mesh, capacity: int) -> PlanCost:
    """The cost of a choice in words.

    Args:
        found: by numbers of mesh axes.
        mesh: that they are of.
        capacity: bytes of one device.
    """
    names = mesh.axis_names
    talking = {"+".join(names[n] for n in axes): one for axes, one in found.talking.items()}
    return PlanCost(found.seconds, found.busy, talking, int(found.memory), capacity, "kinds")


def kinds_of_layouts(
    program: CondensedProgram, layouts: Mapping[str, NamedSharding], mesh: Mesh, capacity: int
) -> PlanCost:
    """The cost by kinds of layouts that somebody wrote down.

    Layouts of parameters and batch do not say along what is computed where they disagree; the best
    of what they may mean counts.

    Args:
        program: the step by kinds.
        layouts: of parameters and batch, by name.
        mesh: the mesh.
        capacity: bytes of one device.
    """
    groups = program.dimensions.groups
    forced = forced_layouts(layouts, groups, mesh)
    cost = AnalyticCost(program, mesh, forced)
    of_axis: list[list[tuple[int, ...]]] = []
    for number in range(len(cost.sizes)):
        batch: dict[int, None] = {}
        model: dict[int, None] = {}
        for place, layout in forced.items():
            group = groups[place]
            for dimension, split in zip(group.dimensions, layout, strict=True):
                if number in split and dimension >= 0:
                    (batch if group.role == "input" else model)[dimension] = None
        orders = [(*batch,), (*model, *batch), (*batch, *model), (*model,)]
        of_axis.append(list(dict.fromkeys(orders)))
    none = (frozenset[int](),) * len(cost.sizes)
    found = [cost.of(Choice(split, none)) for split in itertools.product(*of_axis)]
    best = min(found, key=lambda one: (one.memory > capacity, one.seconds, one.memory))
    return by_kinds(best, mesh, capacity)
