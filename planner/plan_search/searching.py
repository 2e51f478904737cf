"""`iso.planner.search`: from a step and a machine to a plan.

>>> import jax, jax.numpy as jnp
>>> def step(params, batch):
...     def loss(params):
...         x = batch["x"]
...         for layer in params["layers"].values():
...             x = x + jax.nn.relu(x @ layer["up"]["kernel"]) @ layer["down"]["kernel"]
...         return jnp.mean(x**2)
...     return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))
>>> up = jax.ShapeDtypeStruct((2048, 8192), "float32")
>>> down = jax.ShapeDtypeStruct((8192, 2048), "float32")
>>> layer = {"up": {"kernel": up}, "down": {"kernel": down}}
>>> params = {"layers": {"0": layer, "1": layer}}
>>> batch = {"x": jax.ShapeDtypeStruct((512, 2048), "float32")}
>>> found = search(step, (params, batch), "v5e:4x4")
>>> sorted(found.plan.resolve(params, found.mesh, strict=True).specs) == sorted(
...     f"layers.{n}.{name}.kernel" for n in (0, 1) for name in ("up", "down"))
True
"""

from __future__ import annotations

import functools
import math
import time
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from isoshard.core.kit import Plan, ShardingError, TracedStep, as_mesh

from ..machine.topologies import Topology, device_memory
from ..traced.of_step import traced_step
from .analytic_cost import AnalyticCost
from .beam_search import BeamSearch
from .condensed_program import CondensedProgram
from .mesh_shapes import Where, meshes_for
from .plan_candidates import (
    Candidate,
    EvaluatedPlan,
    PlanChecks,
    checked,
    evaluate,
    partitioned,
    under_plan,
)
from .plan_cost import SearchDepth
from .plan_rules import fixed_layouts, forced_layouts
from .search_result import NothingFitsError, RunnerUp, SearchResult, nothing_fits, why_lost
from .searched_step import runs_as_written, searched

MESHES = 3
"""Meshes that are searched: those whose starting choices are the best."""
NEAR = 1.5
"""A choice slower than the best by this factor, by kinds, is not evaluated by the trace."""
TRIES = 3
"""Searches, each with less memory than the one before, while the best plan does not fit."""
LOOKED = 3
"""Strategies that are evaluated for each one that is reported."""
PLAIN = 3
"""Meshes on which each strategy that people write by hand is traced, too: the cost by kinds of
operations underestimates a split sequence."""
STEPS, AROUND = 4, 4
"""Rounds of single changes to the best plan, and how many changes of a round are traced."""
PARTITIONED = 2
"""Plans that XLA's partitioner evaluates, if they fit."""
WRITTEN = 4
"""Plans that are checked with layers written out where a loop takes other seconds."""
MARGIN = 0.92
"""The share of a device's memory that a choice may need at depth "kinds"."""
WIDE = 1.05
"""The share of a device's memory that a choice may need by kinds before it is traced."""
LEAN = 1.02
"""If nothing fits, choices up to this factor of the least memory are evaluated."""
FAR = 1.25
"""How far the memory by kinds may be too high: strategies written by hand are traced up to it."""


def search(
    step: Any,
    args: Sequence[Any] | None,
    mesh: Where,
    *,
    memory: int | None = None,
    fixed: Plan | None = None,
    candidates: int = 4,
    depth: SearchDepth = "trace",
    kwargs: Mapping[str, Any] | None = None,
    batch: Collection[str] | None = None,
) -> SearchResult:
    """Find the plan under which a step is fastest, and fits.

    Args:
        step: a training step or another function, as `iso.planner.estimate` takes it; or a
            `TracedStep`. Its equal layers are followed as one loop. A plan that it has itself is
            left out.
        args: its arguments: arrays, or shapes. None of a `TracedStep`.
        mesh: the mesh; or a machine (`iso.planner.topology`, or its text) or a number of devices,
            of which the mesh is found as well, with axes "data", "model" and "expert".
        memory: bytes that one device has; by default what the chip has.
        fixed: rules of your own; the search adds the others.
        candidates: how many plans of different strategies are evaluated and reported.
        depth: how closely: "kinds" of operations, the traced program, or XLA's partitioner.
        kwargs: keyword arguments of the step.
        batch: of a JAX function, the names of the arguments that are inputs; by default those that
            it does not return.

    Returns:
        The plan, its mesh, its cost, and the others with the reasons why they lost.

    Raises:
        NothingFitsError: no plan fits in memory; the message says by how much, and what would
            help. It is a ShardingError.
        PlanError: `fixed` names an axis that the mesh has not.
        ValueError: `memory`, `depth` or `candidates` is invalid.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def train(w, x):
        ...     return w - 0.1 * jax.grad(lambda w: jnp.square(x @ w).mean())(w)
        >>> w = jax.ShapeDtypeStruct((8192, 8192), "float32")
        >>> x = jax.ShapeDtypeStruct((1024, 8192), "float32")
        >>> found = search(train, (w, x), "v5e:4x4")
        >>> found.mesh.size, found.cost.memory < found.cost.capacity
        (16, True)
    """
    started = time.monotonic()
    check_request(depth, candidates)
    first = meshes_for(mesh)[0]
    capacity = device_memory(first, memory)
    if isinstance(step, TracedStep):
        traced = step
    else:
        traced = traced_step(step, args or (), kwargs or {}, first, batch=batch, unplanned=True)
    followed = searched(traced)
    program = followed.program
    costs = []
    for candidate_mesh in meshes_for(mesh, _experts(program)):
        arguments = fixed_layouts(fixed, traced, candidate_mesh)
        forced = forced_layouts(arguments, program.dimensions.groups, candidate_mesh)
        costs.append(AnalyticCost(program, candidate_mesh, forced))

    def as_written(evaluated: EvaluatedPlan) -> EvaluatedPlan:
        """With layers written out, and traced under its plan: a bridge lays out gradients, too."""
        if traced is step or traced.framework == "jax":
            return checked(followed, evaluated)
        planned = traced_step(
            step, args or (), kwargs or {}, evaluated.candidate.mesh, evaluated.plan
        )
        return under_plan(followed, planned, evaluated)

    def look(candidate: Candidate, depth: SearchDepth) -> EvaluatedPlan:
        return evaluate(followed, candidate, fixed, capacity, depth)

    last = functools.partial(partitioned, followed) if depth == "partition" else None
    checks = PlanChecks(as_written, last)
    evaluations, share = 0, MARGIN if depth == "kinds" else WIDE
    plans: dict[object, EvaluatedPlan] = {}
    ranked: list[EvaluatedPlan] = []
    for tries_left in reversed(range(TRIES)):
        beams = [BeamSearch(cost, share * capacity) for cost in costs]
        chosen = _chosen(beams, LOOKED * candidates)
        evaluations += sum(len(beam.scores) for beam in beams)
        if depth == "kinds":
            plans |= {new.key: look(new, depth) for new in chosen if new.key not in plans}
            ranked = sorted(plans.values(), key=lambda plan: not plan.cost.fits)
        else:
            plain = _plain(beams, PLAIN if tries_left else len(beams), FAR * capacity)
            most = NEAR * chosen[0].scored.score
            near = [candidate for candidate in chosen if candidate.scored.score <= most]
            closely = {candidate.key: candidate for candidate in (*plain, *near)}
            traced_keys = {key for key, plan in plans.items() if plan.cost.depth != "kinds"}
            plans |= {k: look(new, "trace") for k, new in closely.items() if k not in traced_keys}
            plans |= {new.key: look(new, "kinds") for new in chosen if new.key not in plans}
            trace = functools.partial(look, depth="trace")
            plans |= _near_best(list(plans.values()), trace, checks.corrected)
            count = WRITTEN if runs_as_written(first) else 1
            count = PARTITIONED if depth == "partition" else count
            ranked = checks.settled(list(plans.values()), count, leanest=not tries_left)
        best = ranked[0]
        over = [plan for plan in ranked if not plan.cost.fits and plan.cost.depth != "kinds"]
        seconds = {key: plan.cost.seconds for key, plan in plans.items()}
        best_seconds = seconds[best.candidate.key]
        faster = [plan for plan in over if seconds[plan.candidate.key] < best_seconds]
        if best.cost.fits and not (faster and tries_left == TRIES - 1):
            break
        leanest = LEAN * min(beam.leanest() for beam in beams) / capacity
        tighter = max((_by_kinds(plan) for plan in faster or over), default=1.0)
        share = max(leanest, min(0.9 * share, tighter)) if tries_left > 1 else leanest
    if not ranked[0].cost.fits:
        raise NothingFitsError(nothing_fits(traced, ranked))
    return _result(ranked, candidates, costs, evaluations, time.monotonic() - started)


def _by_kinds(evaluated: EvaluatedPlan) -> float:
    """A plan's memory by kinds, relative to its memory by the trace."""
    return evaluated.candidate.scored.cost.memory / evaluated.cost.memory


def _near_best(
    plans: Sequence[EvaluatedPlan],
    look: Callable[[Candidate], EvaluatedPlan],
    corrected: Callable[[EvaluatedPlan], EvaluatedPlan],
) -> dict[object, EvaluatedPlan]:
    """Hill climbing from the best plan: all plans that its rounds of single changes evaluated."""

    def order(evaluated: EvaluatedPlan) -> tuple[object, ...]:
        return evaluated.cost.depth == "kinds", *corrected(evaluated).order

    best = min(plans, key=order)
    traced_keys = {plan.candidate.key for plan in plans if plan.cost.depth != "kinds"}
    more = dict[object, EvaluatedPlan]()
    for _ in range(STEPS):
        beam = best.candidate.beam
        near = [Candidate(scored, beam) for scored in beam.around(best.candidate.choice, AROUND)]
        new = {
            candidate.key: look(candidate) for candidate in near if candidate.key not in traced_keys
        }
        more |= new
        traced_keys |= new.keys()
        better = min([best, *new.values()], key=order)
        if better is best:
            break
        best = better
    return more


def _result(
    ranked: Sequence[EvaluatedPlan],
    count: int,
    costs: Sequence[AnalyticCost],
    evaluated: int,
    taken: float,
) -> SearchResult:
    of_kind: dict[object, EvaluatedPlan] = {}
    for plan in ranked:
        of_kind.setdefault(plan.candidate.kind, plan)
    best, *rest = list(of_kind.values())[:count]
    others = tuple(
        RunnerUp(
            plan.plan, plan.candidate.mesh, plan.cost, why_lost(plan.cost, best.cost), plan.idea
        )
        for plan in rest
    )
    least = min(cost.least_seconds() for cost in costs)
    mesh = best.candidate.mesh
    return SearchResult(best.plan, mesh, best.cost, best.idea, others, least, evaluated, taken)


def plan_for(
    step: Any,
    args: Sequence[Any] | None,
    mesh: Any,
    *,
    memory: int | None = None,
    fixed: Plan | None = None,
) -> Plan:
    """The plan of `Plan.auto`.

    Raises:
        ShardingError: as `search`; or `mesh` is not a mesh, whose axes a plan names.
    """
    if isinstance(mesh, Topology | str | int):
        raise ShardingError(
            f"Plan.auto needs a mesh, whose axes the plan names, not {mesh!r}; "
            "iso.planner.search finds the mesh as well"
        )
    return search(step, args, as_mesh(mesh), memory=memory, fixed=fixed).plan


def _chosen(beams: list[BeamSearch], count: int) -> list[Candidate]:
    """The best choices on the best meshes, one for each strategy on each mesh.

    Choices of equal cost to the last digit differ only in the names of the mesh axes.
    """
    beams = sorted(beams, key=lambda beam: beam.begin())[:MESHES]
    each = math.ceil(count / len(beams))
    chosen: dict[object, Candidate] = {}
    for beam in beams:
        for scored in beam.run(each):
            cost = scored.cost
            key = scored.score, float(f"{cost.memory:.9e}"), float(f"{cost.busy:.9e}")
            chosen.setdefault(key, Candidate(scored, beam))
    return sorted(chosen.values(), key=lambda candidate: candidate.scored.score)


def _plain(beams: Sequence[BeamSearch], count: int, most: float) -> list[Candidate]:
    """The strategies that people write by hand, each on the `count` meshes where it is best.

    Those that need more than `most` bytes by kinds are left out.
    """
    by_strategy: dict[str, list[Candidate]] = {}
    for beam in beams:
        for name, scored in beam.plain().items():
            if scored.cost.memory <= most:
                by_strategy.setdefault(name, []).append(Candidate(scored, beam))
    for same in by_strategy.values():
        same.sort(key=lambda candidate: candidate.scored.score)
    return [candidate for same in by_strategy.values() for candidate in same[:count]]


def _experts(program: CondensedProgram) -> int:
    """The number of experts of a mixture; 1 without one."""
    sizes = (
        group.shape[0]
        for group in program.dimensions.groups
        if "expert" in group.names[0] and len(group.shape) > 2
    )
    return max(sizes, default=1)


_DEPTHS = typing.get_args(SearchDepth)


def check_request(depth: object, candidates: object) -> None:
    """Check arguments of `search` before it begins.

    Raises:
        ValueError: there is no such depth; or `candidates` is less than 1.
    """
    if depth not in _DEPTHS:
        raise ValueError(
            f"depth= must be {', '.join(map(repr, _DEPTHS))}, not {depth!r}; for the target's "
            "compiler, iso.planner.estimate(step, args, mesh, found.plan, depth='compile')"
        )
    if not isinstance(candidates, int) or candidates < 1:
        raise ValueError(f"candidates= is the number of plans to report, 1 or more: {candidates!r}")
