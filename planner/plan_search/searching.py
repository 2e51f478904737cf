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

What a search can be asked for.
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
from .plan_candidates import Candidate, PlanChecks, SeenPlan, checked, partitioned, seen, under_plan
from .plan_cost import SearchDepth
from .plan_rules import fixed_layouts, forced_layouts
from .search_result import NothingFitsError, RunnerUp, SearchResult, nothing_fits, why_lost
from .searched_step import runs_as_written, searched

MESHES = 3
"""So many meshes are looked at closely, those that start best."""
NEAR = 1.5
"""What is slower than the best by this, by kinds, is not looked at more closely."""
TRIES = 3
"""So often it is searched, with less memory each time, if what seemed best does not fit."""
LOOKED = 3
"""So many strategies are looked at closely for each one that is reported."""
PLAIN = 3
"""On so many meshes each strategy that people write by hand is looked at closely, too: by kinds of
operations a split sequence may seem faster than it is."""
STEPS, AROUND = 4, 4
"""So often what was found is changed by one thing, and so many changes are looked at closely."""
PARTITIONED = 2
"""So many plans are given to XLA's partitioner, if they fit."""
WRITTEN = 4
"""So many plans are checked with layers written out where they take other seconds so."""
MARGIN = 0.92
"""Of a device's memory, what a choice may need if the estimate by kinds has the last word."""
WIDE = 1.05
"""Of a device's memory, what a choice may need by kinds at first if it is looked at closely."""
LEAN = 1.02
"""What may need so much of the leanest choice's memory is looked at, if nothing else fits."""
FAR = 1.25
"""By so much memory by kinds may be too high: what people write by hand is looked at up to it."""


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
        fixed: rules of your own, which stay; the rest is found.
        candidates: how many plans of different strategies are looked at closely.
        depth: how closely: "kinds" of operations, the traced program, or XLA's partitioner.
        kwargs: keyword arguments of the step.
        batch: of a JAX function, the names of the arguments that are inputs; by default those that
            it does not give back.

    Returns:
        The plan, its mesh, its cost, and the others with the reasons why they lost.

    Raises:
        NothingFitsError: no plan fits in memory; the message says by how much, and what would
            help. It is a ShardingError.
        PlanError: `fixed` names an axis that the mesh has not.
        ValueError: `memory`, `depth` or `candidates` is none that there can be.

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
    for one in meshes_for(mesh, _experts(program)):
        arguments = fixed_layouts(fixed, traced, one)
        forced = forced_layouts(arguments, program.dimensions.groups, one)
        costs.append(AnalyticCost(program, one, forced))

    def as_written(visited: SeenPlan) -> SeenPlan:
        """With layers written out, and traced under its plan: a bridge lays out gradients, too."""
        if traced is step or traced.framework == "jax":
            return checked(followed, visited)
        as_written = traced_step(
            step, args or (), kwargs or {}, visited.candidate.mesh, visited.plan
        )
        return under_plan(followed, as_written, visited)

    def look(candidate: Candidate, depth: SearchDepth) -> SeenPlan:
        return seen(followed, candidate, fixed, capacity, depth)

    last = functools.partial(partitioned, followed) if depth == "partition" else None
    checks = PlanChecks(as_written, last)
    evaluated, share = 0, MARGIN if depth == "kinds" else WIDE
    result: dict[object, SeenPlan] = {}
    ranked: list[SeenPlan] = []
    for left in reversed(range(TRIES)):
        beams = [BeamSearch(cost, share * capacity) for cost in costs]
        chosen = _chosen(beams, LOOKED * candidates)
        evaluated += sum(len(beam.seen) for beam in beams)
        if depth == "kinds":
            result |= {one.key: look(one, depth) for one in chosen if one.key not in result}
            ranked = sorted(result.values(), key=lambda value: not value.cost.fits)
        else:
            plain = _plain(beams, PLAIN if left else len(beams), FAR * capacity)
            near = [one for one in chosen if one.scored.score <= NEAR * chosen[0].scored.score]
            closely = {one.key: one for one in (*plain, *near)}
            cache = {key for key, one in result.items() if one.cost.depth != "kinds"}
            result |= {key: look(one, "trace") for key, one in closely.items() if key not in cache}
            result |= {one.key: look(one, "kinds") for one in chosen if one.key not in result}
            trace = functools.partial(look, depth="trace")
            result |= _near_best(list(result.values()), trace, checks.told)
            count = WRITTEN if runs_as_written(first) else 1
            count = PARTITIONED if depth == "partition" else count
            ranked = checks.settled(list(result.values()), count, leanest=not left)
        best = ranked[0]
        over = [one for one in ranked if not one.cost.fits and one.cost.depth != "kinds"]
        traced_seconds = {key: one.cost.seconds for key, one in result.items()}
        most = traced_seconds[best.candidate.key]
        missed = [one for one in over if traced_seconds[one.candidate.key] < most]
        if best.cost.fits and not (missed and left == TRIES - 1):
            break
        leanest = LEAN * min(beam.leanest() for beam in beams) / capacity
        tighter = max((_by_kinds(one) for one in missed or over), default=1.0)
        share = max(leanest, min(0.9 * share, tighter)) if left > 1 else leanest
    if not ranked[0].cost.fits:
        raise NothingFitsError(nothing_fits(traced, ranked))
    return _result(ranked, candidates, costs, evaluated, time.monotonic() - started)


def _by_kinds(visited: SeenPlan) -> float:
    """How much memory a plan needs by kinds, of what a check found."""
    return visited.candidate.scored.cost.memory / visited.cost.memory


def _near_best(
    result: Sequence[SeenPlan],
    look: Callable[[Candidate], SeenPlan],
    text: Callable[[SeenPlan], SeenPlan],
) -> dict[object, SeenPlan]:
    """What single changes make of the best, and of what they made of it."""

    def order(visited: SeenPlan) -> tuple[object, ...]:
        return visited.cost.depth == "kinds", *text(visited).order

    best = min(result, key=order)
    cache = {one.candidate.key for one in result if one.cost.depth != "kinds"}
    more = dict[object, SeenPlan]()
    for _ in range(STEPS):
        beam = best.candidate.beam
        near = [Candidate(one, beam) for one in beam.around(best.candidate.choice, AROUND)]
        new = {one.key: look(one) for one in near if one.key not in cache}
        more |= new
        cache |= new.keys()
        better = min([best, *new.values()], key=order)
        if better is best:
            break
        best = better
    return more


def _result(
    result: Sequence[SeenPlan],
    count: int,
    costs: Sequence[AnalyticCost],
    evaluated: int,
    taken: float,
) -> SearchResult:
    of_kind: dict[object, SeenPlan] = {}
    for one in result:
        of_kind.setdefault(one.candidate.kind, one)
    best, *rest = list(of_kind.values())[:count]
    others = tuple(
        RunnerUp(one.plan, one.candidate.mesh, one.cost, why_lost(one.cost, best.cost), one.idea)
        for one in rest
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
    """What `Plan.auto` gives.

    Raises:
        ShardingError: as `search`; or it is no mesh, without whose axes there is no plan.
    """
    if isinstance(mesh, Topology | str | int):
        raise ShardingError(
            f"Plan.auto needs a mesh, whose axes the plan names, not {mesh!r}; "
            "iso.planner.search finds the mesh as well"
        )
    return search(step, args, as_mesh(mesh), memory=memory, fixed=fixed).plan


def _chosen(beams: list[BeamSearch], count: int) -> list[Candidate]:
    """The best of the meshes that start best, of each strategy on each mesh one.

    What costs the same to the last digit is the same under other names of the axes.
    """
    beams = sorted(beams, key=lambda one: one.begin())[:MESHES]
    each = math.ceil(count / len(beams))
    chosen: dict[object, Candidate] = {}
    for beam in beams:
        for one in beam.run(each):
            same = one.score, float(f"{one.cost.memory:.9e}"), float(f"{one.cost.busy:.9e}")
            chosen.setdefault(same, Candidate(one, beam))
    return sorted(chosen.values(), key=lambda value: value.scored.score)


def _plain(beams: Sequence[BeamSearch], count: int, most: float) -> list[Candidate]:
    """The strategies that people write by hand, on so many meshes where they seem best.

    Those that need more than `most` bytes by kinds are left out.
    """
    result: dict[str, list[Candidate]] = {}
    for beam in beams:
        for name, scored in beam.plain().items():
            if scored.cost.memory <= most:
                result.setdefault(name, []).append(Candidate(scored, beam))
    best = {name: sorted(each, key=lambda one: one.scored.score) for name, each in result.items()}
    return [one for each in best.values() for one in each[:count]]


def _experts(program: CondensedProgram) -> int:
    """How many experts a mixture has; 1: it is none."""
    sizes = (
        group.shape[0]
        for group in program.dimensions.groups
        if "expert" in group.names[0] and len(group.shape) > 2
    )
    return max(sizes, default=1)


_DEPTHS = typing.get_args(SearchDepth)


def check_request(depth: object, candidates: object) -> None:
    """Refuse what a search cannot do, before it begins.

    Raises:
        ValueError: there is no such depth; or no plan at all is to be found.
    """
    if depth not in _DEPTHS:
        raise ValueError(
            f"depth is {', '.join(map(repr, _DEPTHS))}, not {depth!r}; iso.planner.estimate(step, "
            "args, mesh, found.plan, depth='compile') asks the target's compiler of what is found"
        )
    if not isinstance(candidates, int) or candidates < 1:
        raise ValueError(f"candidates= is how many plans are told, 1 or more, not {candidates!r}")
