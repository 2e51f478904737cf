"""The result of a search: a plan, its mesh and cost, and the runners-up."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from jax.sharding import Mesh

from isoshard.core.kit import UNSET, Plan, ShardingError, TracedStep, human_bytes, preformatted

from ..reports.advice import RECOMPUTE
from .plan_candidates import EvaluatedPlan, layouts_of_choice
from .plan_cost import PlanCost

NAMES = 4
"""Patterns of one spec that are printed; `plan.rules` and `plan.activations` have all."""


class NothingFitsError(ShardingError, code="ISO044"):
    """No plan fits in memory; the message says by how much, and what would help.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from isoshard.planner.plan_search.searching import search
        >>> w = jax.ShapeDtypeStruct((8192, 8192), "float32")
        >>> try:
        ...     search(jnp.dot, (w, w), "v5e:4x4", memory=1000)
        ... except NothingFitsError as error:
        ...     print(str(error).partition(".")[0])
        dot: no plan fits in the 1000 B of a device
    """


@dataclasses.dataclass(frozen=True)
class RunnerUp:
    """A plan that was not the best.

    Attributes:
        plan: the plan.
        mesh: its mesh.
        cost: its cost.
        why: why it lost, in words.
        idea: what each mesh axis splits, in words.
    """

    plan: Plan
    mesh: Mesh
    cost: PlanCost
    why: str
    idea: str = ""


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The result of a search; `print` it for a table.

    Attributes:
        plan: the best plan.
        mesh: its mesh.
        cost: its cost.
        idea: what each mesh axis splits, in words.
        runners_up: others, best first, each of another strategy.
        least_seconds: a lower bound of all plans: every device computes all the time.
        evaluated: how many choices were evaluated.
        seconds_taken: of the search.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from isoshard.planner.plan_search.searching import search
        >>> w = jax.ShapeDtypeStruct((8192, 8192), "float32")
        >>> found = search(jnp.dot, (w, w), "v5e:4x4")
        >>> found.mesh.size, found.cost.seconds >= found.least_seconds
        (16, True)
    """

    plan: Plan
    mesh: Mesh
    cost: PlanCost
    idea: str
    runners_up: tuple[RunnerUp, ...]
    least_seconds: float
    evaluated: int
    seconds_taken: float

    def __str__(self) -> str:
        """The plan's rules by spec, its mesh and cost, and a line for each of the others."""
        lines = [
            f"{described(self.mesh)}: {_cost(self.cost)}, at most "
            f"{self.cost.seconds / self.least_seconds:.2f} times the least possible",
            f"  {self.idea}",
            *_rules(self.plan),
        ]
        for runner_up in self.runners_up:
            lines += [f"not {described(runner_up.mesh)}: {runner_up.idea}"]
            lines += [f"    {_cost(runner_up.cost)}: {runner_up.why}"]
        lines.append(
            f"{self.evaluated} choices in {self.seconds_taken:.1f} s, by {self.cost.depth!r}"
        )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return preformatted(str(self))


def described(mesh: Mesh) -> str:
    """The axes of a mesh with their sizes."""
    return "mesh (" + ", ".join(f"{name}={size}" for name, size in mesh.shape.items()) + ")"


def why_lost(cost: PlanCost, best: PlanCost) -> str:
    """Why a plan is not the best, in words."""
    if not cost.fits:
        return (
            f"needs {human_bytes(cost.memory)} on a device, "
            f"{human_bytes(cost.memory - cost.capacity)} more than its {human_bytes(cost.capacity)}"
        )
    if cost.depth != best.depth:
        return f"slower than the best by {cost.depth!r}, so not evaluated by {best.depth!r}"
    share = cost.seconds / best.seconds - 1
    more = {"computing": cost.busy - best.busy} | {
        f"collectives along {axes}": cost.collectives.get(axes, 0.0)
        - best.collectives.get(axes, 0.0)
        for axes in {*cost.collectives, *best.collectives}
    }
    reason = max(sorted(more), key=more.__getitem__)
    if share < 5e-4:
        return "as fast, with more rules"
    if more[reason] <= 0:
        return f"{share:.1%} slower, less of its collectives overlaps with computing"
    return f"{share:.1%} slower, {_time(more[reason])} more of {reason}"


def nothing_fits(step: TracedStep, plans: Sequence[EvaluatedPlan]) -> str:
    """The message of `NothingFitsError`.

    Args:
        step: the step.
        plans: that were evaluated; the first does not fit. Others may seem to, with layers as
            loops.
    """
    least = min([plan for plan in plans if not plan.cost.fits], key=lambda plan: plan.cost.memory)
    mesh, cost = least.candidate.mesh, least.cost
    layouts = layouts_of_choice(step, least.candidate.cost, least.candidate.choice)
    resting = sum(leaf.bytes_per_device for leaf in step.resharded(layouts, mesh).inputs)
    more = math.ceil(mesh.size * cost.memory / cost.capacity)
    fixes = _fixes(step, resting > cost.memory / 2)
    return (
        f"{step.name}: no plan fits in the {human_bytes(cost.capacity)} of a device. The least "
        f"needs {human_bytes(cost.memory)}, {human_bytes(cost.memory - cost.capacity)} too much; "
        f"of it {human_bytes(resting)} are stored between steps. What would help: more devices "
        f"(about {more}, not {mesh.size}), {', '.join(fixes)}"
    )


def _fixes(step: TracedStep, mostly_state: bool) -> list[str]:
    fixes = ["a smaller batch"]
    again = ("remat", "remat2", "checkpoint")
    how = RECOMPUTE.get(step.framework)
    if how and not any(eqn.primitive.name in again for eqn in step.program.eqns):
        fixes.append(f"layers computed again in the backward pass ({how})")
    if any(leaf.role == "parameter" and leaf.dtype.itemsize > 2 for leaf in step.inputs):
        fixes.append("parameters or optimizer state in bfloat16")
    return fixes[::-1] if mostly_state else fixes


def _cost(cost: PlanCost) -> str:
    memory = f"{human_bytes(cost.memory)} of {human_bytes(cost.capacity)} on a device"
    return f"{_time(cost.seconds)} a step, {memory}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _rules(plan: Plan) -> list[str]:
    """The plan's rules in order, neighbours with the same spec on one line."""
    sections = {
        "parameters": plan.rules,
        "inputs": () if plan.inputs is UNSET else plan.inputs,
        "outputs of modules": [(name, activation.output) for name, activation in plan.activations],
    }
    lines = []
    for title, pairs in sections.items():
        lines += [f"  {title}"] if pairs else []
        for spec, same in itertools.groupby(pairs, key=lambda pair: _spec_text(pair[1])):
            names = [name for name, _ in same]
            shown = ", ".join(names[:NAMES])
            more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
            lines.append(f"    {shown}{more}: {spec}")
    return lines


def _spec_text(spec: object) -> str:
    return "replicated" if spec is None else str(spec)
