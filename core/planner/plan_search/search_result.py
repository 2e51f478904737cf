"""What a search found: a plan, its mesh, what it costs, and what else was near."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jax.sharding import Mesh

from isoshard.core.errors import ShardingError
from isoshard.core.plan import Plan
from isoshard.core.runtime.metrics import human_bytes

from ..traced.traced_step import TracedStep
from .close_look import SeenPlan, layouts_of_choice
from .plan_cost import PlanCost


class NothingFitsError(ShardingError):
    """No plan fits in memory; the message says by how much, and what would help.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from isoshard.core.planner.plan_search.searching import search
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
        plan: it.
        mesh: that it is for.
        cost: what it costs.
        why: why it lost, in words.
    """

    plan: Plan
    mesh: Mesh
    cost: PlanCost
    why: str


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """What a search found; `print` it for a table.

    Attributes:
        plan: the best plan.
        mesh: that it is for.
        cost: what it costs.
        runners_up: others, best first, of other strategies.
        least_seconds: what no plan can be faster than: every device computing all the time.
        evaluated: how many choices were looked at.
        seconds_taken: of the search.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from isoshard.core.planner.plan_search.searching import search
        >>> w = jax.ShapeDtypeStruct((8192, 8192), "float32")
        >>> found = search(jnp.dot, (w, w), "v5e:4x4")
        >>> found.mesh.size, found.cost.seconds >= found.least_seconds
        (16, True)
    """

    plan: Plan
    mesh: Mesh
    cost: PlanCost
    runners_up: tuple[RunnerUp, ...]
    least_seconds: float
    evaluated: int
    seconds_taken: float

    def __str__(self) -> str:
        """The plan, its mesh, and the others with the reasons."""
        lines = [
            f"{described(self.mesh)}: {_cost(self.cost)}, at most "
            f"{self.cost.seconds / self.least_seconds:.2f} times the least possible",
            *_rules(self.plan),
        ]
        for one in self.runners_up:
            lines += [f"not {described(one.mesh)}: {_cost(one.cost)}: {one.why}"]
            lines += _rules(one.plan)
        lines.append(f"{self.evaluated} choices in {self.seconds_taken:.1f} s")
        return "\n".join(lines)


def described(mesh: Mesh) -> str:
    """The axes of a mesh with their sizes.

    Args:
        mesh: any.
    """
    return "mesh (" + ", ".join(f"{name}={size}" for name, size in mesh.shape.items()) + ")"


def why_lost(one: PlanCost, best: PlanCost) -> str:
    """Why a plan is not the best, in words.

    Args:
        one: what it costs.
        best: what the best costs.
    """
    if not one.fits:
        return (
            f"needs {human_bytes(one.memory)} on a device, {human_bytes(one.memory - one.capacity)}"
            f" more than the {human_bytes(one.capacity)} there are"
        )
    if one.depth != best.depth:
        return f"behind the best by {one.depth!r}, so not looked at by {best.depth!r}"
    share = one.seconds / best.seconds - 1
    more = {"computing": one.busy - best.busy} | {
        f"talking along {axes}": one.collectives.get(axes, 0.0) - best.collectives.get(axes, 0.0)
        for axes in {*one.collectives, *best.collectives}
    }
    reason = max(sorted(more), key=more.__getitem__)
    if share < 5e-4:
        return "as fast, with more to say"
    return f"{share:.1%} slower, by {_time(more[reason])} more of {reason}"


def nothing_fits(step: TracedStep, found: Sequence[SeenPlan]) -> str:
    """The message of a search that found nothing.

    Args:
        step: the step.
        found: what it looked at; not empty.
    """
    least = min(found, key=lambda one: one.cost.memory)
    mesh, cost = least.candidate.mesh, least.cost
    layouts = layouts_of_choice(step, least.candidate.cost, least.candidate.choice)
    resting = sum(one.bytes_per_device for one in step.laid_out(layouts, mesh).inputs)
    more = math.ceil(mesh.size * cost.memory / cost.capacity)
    ways = _ways_out(step, resting > cost.memory / 2)
    return (
        f"{step.name}: no plan fits in the {human_bytes(cost.capacity)} of a device. The least "
        f"needs {human_bytes(cost.memory)}, {human_bytes(cost.memory - cost.capacity)} too much; "
        f"of it {human_bytes(resting)} rest between steps. What would help: more devices (about "
        f"{more}, not {mesh.size}), {', '.join(ways)}"
    )


def _ways_out(step: TracedStep, rests: bool) -> list[str]:
    ways = ["a smaller batch"]
    again = ("remat", "remat2", "checkpoint")
    if not any(one.primitive.name in again for one in step.program.jaxpr.eqns):
        ways.append("layers computed again in the backward pass (jax.checkpoint)")
    if any(one.role == "parameter" and one.dtype.itemsize > 2 for one in step.inputs):
        ways.append("parameters or optimizer state in bfloat16")
    return ways[::-1] if rests else ways


def _cost(cost: PlanCost) -> str:
    return f"{_time(cost.seconds)} a step, {human_bytes(cost.memory)} on a device"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _rules(plan: Plan) -> list[str]:
    lines = [f"    {pattern}: {spec}" for pattern, spec in plan.rules]
    if plan.inputs:
        lines.append(f"    inputs: {dict(plan.inputs)}")
    if plan.activations:
        lines.append(f"    activations: {dict(plan.activations)}")
    return lines
