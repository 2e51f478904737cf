"""`iso.planner.search`: from a step and a machine to a plan.

>>> import jax, jax.numpy as jnp
>>> def step(params, batch):
...     def loss(params):
...         x = batch["x"]
...         for layer in params["layers"].values():
...             x = x + jax.nn.relu(x @ layer["up"]["kernel"]) @ layer["down"]["kernel"]
...         return jnp.mean(x**2)
...     return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))
>>> up, down = jax.ShapeDtypeStruct((2048, 8192), "float32"), jax.ShapeDtypeStruct((8192, 2048), "float32")
>>> layer = {"up": {"kernel": up}, "down": {"kernel": down}}
>>> params = {"layers": {"0": layer, "1": layer}}
>>> batch = {"x": jax.ShapeDtypeStruct((512, 2048), "float32")}
>>> found = search(step, (params, batch), "v5e:4x4")
>>> sorted(found.plan.resolve(params, found.mesh, strict=True).specs) == sorted(
...     f"layers.{n}.{name}.kernel" for n in (0, 1) for name in ("up", "down"))
True
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from isoshard.core.errors import ShardingError
from isoshard.core.frameworks import framework_of
from isoshard.core.layout.mesh import as_mesh
from isoshard.core.plan import Plan
from isoshard.core.runtime.metrics import human_bytes

from ..axes.factor_layouts import ArrayLayout
from ..machine.topologies import Topology, topology_of
from ..traced.jax_steps import traced_jax_step
from ..traced.traced_step import TracedStep
from .analytic_cost import AnalyticCost, Choice
from .beam_search import EACH_RULE, BeamSearch, Scored
from .condensed_program import CondensedProgram, condensed
from .fixed_rules import fixed_layouts, forced_layouts, joined
from .found_rules import input_rules_of, rules_of
from .mesh_shapes import Where, meshes_for
from .named_dimensions import named_dimensions
from .plan_cost import SearchDepth, by_kinds
from .search_result import RunnerUp, SearchResult, why_lost

MESHES = 3
"""So many meshes are looked at closely, those that start best."""
_AGAIN = ("remat", "remat2", "checkpoint")
MARGIN = 0.92
"""Of a device's memory, what a choice may need by the estimate by kinds."""


@dataclasses.dataclass(frozen=True)
class _Candidate:
    scored: Scored
    cost: AnalyticCost

    @property
    def mesh(self) -> Mesh:
        return self.cost.mesh


def search(
    step: Any,
    args: Sequence[Any] | None,
    mesh: Where,
    *,
    memory: int | None = None,
    fixed: Plan | None = None,
    candidates: int = 4,
    depth: SearchDepth = "trace",
) -> SearchResult:
    """Find the plan under which a step is fastest, and fits.

    Args:
        step: a training step or another function, as `iso.planner.estimate` takes it; or a
            `TracedStep`.
        args: its arguments: arrays, or shapes. None of a `TracedStep`.
        mesh: the mesh; or a machine (`iso.planner.topology`, or its text) or a number of devices,
            of which the mesh is found as well, with axes "data", "model" and "expert".
        memory: bytes that one device has; by default what the chip has.
        fixed: rules of your own, which stay; the rest is found.
        candidates: how many plans of different strategies are looked at closely.
        depth: how closely: "kinds" of operations, the traced program, or XLA's partitioner.

    Returns:
        The plan, its mesh, its cost, and the others with the reasons why they lost.

    Raises:
        ShardingError: no plan fits in memory; the message says by how much, and what would help.
        PlanError: `fixed` names an axis that the mesh has not.
    """
    started = time.monotonic()
    first = meshes_for(mesh)[0]
    traced = step if isinstance(step, TracedStep) else _traced(step, args or (), first)
    program = condensed(traced, named_dimensions(traced))
    beams = []
    for one in meshes_for(mesh, _experts(program)):
        given = fixed_layouts(fixed, traced, one)
        cost = AnalyticCost(program, one, forced_layouts(given, program.dimensions.groups, one))
        beams.append(BeamSearch(cost, MARGIN * _capacity(one, memory)))
    beams.sort(key=lambda one: one.begin())
    best_of = dict[object, _Candidate]()
    for beam in beams[:MESHES]:
        for scored in beam.run(candidates):
            one = _Candidate(scored, beam.cost)
            strategy = beam.strategy(scored.choice)
            held = best_of.get(strategy)
            if held is None or scored.score < held.scored.score:
                best_of[strategy] = one
    found = sorted(best_of.values(), key=lambda one: one.scored.score)
    written = {
        (tuple(one.mesh.shape.items()), plan_of(traced, one, fixed)): one
        for one in reversed(found[: 3 * candidates])
    }
    found = sorted(written.values(), key=lambda one: one.scored.score)
    plans = [plan_of(traced, one, fixed) for one in found]
    costs = [
        by_kinds(one.scored.cost, one.mesh, _capacity(one.mesh, memory))
        for one, _ in zip(found, plans, strict=False)
    ]

    def order(number: int) -> tuple[bool, float, int]:
        said = len(plans[number].rules) + len(found[number].mesh.axis_names)
        return not costs[number].fits, costs[number].seconds * (1 + EACH_RULE * said), number

    best, *rest = sorted(range(len(costs)), key=order)[:candidates]
    if not costs[best].fits:
        raise ShardingError(_nothing_fits(traced, found, memory))
    others = tuple(
        RunnerUp(plans[n], found[n].mesh, costs[n], why_lost(costs[n], costs[best])) for n in rest
    )
    return SearchResult(
        plans[best], found[best].mesh, costs[best], others,
        min(beam.cost.least_seconds() for beam in beams),
        sum(len(beam.seen) for beam in beams), time.monotonic() - started,
    )  # fmt: skip


def plan_for(
    step: Any,
    args: Sequence[Any] | None,
    mesh: Any,
    *,
    memory: int | None = None,
    fixed: Plan | None = None,
) -> Plan:
    """What `Plan.auto` gives.

    Args:
        step: as for `search`.
        args: likewise.
        mesh: a mesh, or what `as_mesh` takes.
        memory: as for `search`.
        fixed: likewise.

    Raises:
        ShardingError: as `search`; or it is no mesh, without whose axes there is no plan.
    """
    if isinstance(mesh, Topology | str | int):
        raise ShardingError(
            f"Plan.auto needs a mesh, whose axes the plan names, not {mesh!r}; "
            "iso.planner.search finds the mesh as well"
        )
    return search(step, args, as_mesh(mesh), memory=memory, fixed=fixed).plan


def layouts_of_choice(
    step: TracedStep, cost: AnalyticCost, choice: Choice
) -> dict[str, NamedSharding]:
    """The layout of each parameter, buffer and array of the batch.

    Args:
        step: the step.
        cost: of the mesh.
        choice: over it.
    """
    of_group = {
        name: _spec(cost.group_layout(number, choice), cost.mesh)
        for number, group in enumerate(cost.program.dimensions.groups)
        for name in group.names
    }
    return {
        one.name: NamedSharding(cost.mesh, of_group[one.name])
        for one in step.inputs
        if one.name in of_group
    }


def plan_of(step: TracedStep, candidate: _Candidate, fixed: Plan | None) -> Plan:
    """The plan that says what a candidate chose."""
    layouts = layouts_of_choice(step, candidate.cost, candidate.scored.choice)
    decided = {} if fixed is None or fixed.product else fixed_layouts(fixed, step, candidate.mesh)
    model: dict[str, PartitionSpec] = {}
    batch: dict[str, PartitionSpec] = {}
    for one in step.inputs:
        if one.name in layouts and not one.name.startswith("closed_over."):
            if one.role == "input":
                batch[one.name] = layouts[one.name].spec
            elif one.name not in decided:
                model[one.name] = layouts[one.name].spec
    more = {"inputs": input_rules_of(batch)} if batch else {}
    return joined(fixed, Plan(rules_of(model), **more))


def _spec(layout: ArrayLayout, mesh: Mesh) -> PartitionSpec:
    entries: list[Any] = []
    for split in layout:
        names = tuple(mesh.axis_names[one] for one in split)
        entries.append(None if not names else names[0] if len(names) == 1 else names)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _traced(step: Any, args: Sequence[Any], mesh: Mesh) -> TracedStep:
    framework = framework_of(step)
    if framework is not None:
        return framework.traced_step(step, tuple(args), {}, mesh, None)
    return traced_jax_step(step, args, {}, mesh)


def _capacity(mesh: Mesh, memory: int | None) -> int:
    return topology_of(mesh).chip.memory if memory is None else int(memory)


def _experts(program: CondensedProgram) -> int:
    """How many experts a mixture has; 1: it is none."""
    sizes = (
        group.shape[0]
        for group in program.dimensions.groups
        if "expert" in group.names[0] and len(group.shape) > 2
    )
    return max(sizes, default=1)


def _nothing_fits(step: TracedStep, found: Sequence[_Candidate], memory: int | None) -> str:
    least = min(found, key=lambda one: one.scored.cost.memory)
    capacity = _capacity(least.mesh, memory)
    needed = least.scored.cost.memory
    layouts = layouts_of_choice(step, least.cost, least.scored.choice)
    resting = sum(one.bytes_per_device for one in step.laid_out(layouts, least.mesh).inputs)
    more = math.ceil(least.mesh.size * needed / capacity)
    return (
        f"{step.name}: no plan fits in the {human_bytes(capacity)} of a device. The least needs "
        f"{human_bytes(needed)}, {human_bytes(needed - capacity)} too much; of it "
        f"{human_bytes(resting)} rest between steps. What would help: more devices (about {more}, "
        f"not {least.mesh.size}), {', '.join(_ways_out(step, resting > needed / 2))}"
    )


def _ways_out(step: TracedStep, rests: bool) -> list[str]:
    ways = ["a smaller batch"]
    if not any(one.primitive.name in _AGAIN for one in step.program.jaxpr.eqns):
        ways.append("layers computed again in the backward pass (jax.checkpoint)")
    if any(one.role == "parameter" and one.dtype.itemsize > 2 for one in step.inputs):
        ways.append("parameters or optimizer state in bfloat16")
    return ways[::-1] if rests else ways
