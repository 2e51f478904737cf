"""The collectives of a program between slices, checked against those that its plan allows.

>>> import jax, jax.numpy as jnp
>>> from isoshard import P, hybrid_mesh, shard
>>> mesh = hybrid_mesh((1, 4), (2, 1), ("replica", "model"))     # two slices of four devices
>>> x, w = shard(jnp.ones((8, 16)), mesh, P("replica")), shard(jnp.ones((16, 8)), mesh, P())
>>> program = jax.jit(jax.grad(lambda w, x: (x @ w).sum())).lower(w, x).compile()
>>> for use in crossings(program, mesh, slices=2):
...     print(use.kind, use.axes, use.slices, use.bytes, use.count)
all-reduce ('replica',) 2 512 1
>>> found = check_crossings(program, mesh, Plan(dcn={"replica": "all-reduce"}), slices=2)

Under a plan that does not allow them it is a `PlanError`.
"""

from __future__ import annotations

from typing import Any, Protocol

from isoshard.core.kit import Plan, PlanError, as_mesh, human_bytes, parsed, slice_axes

from ..costs.device_program import collectives_of
from ..reports.findings import CollectiveUse
from ..reports.key_figures import axes_text
from ..reports.report import Report
from .device_ops import device_ops


class CompiledProgram(Protocol):
    """A program with HLO text: `jax.jit(f).lower(..).compile()`."""

    def as_text(self) -> str | None:
        """The optimised HLO."""
        ...


Program = Report | CompiledProgram | str


def crossings(
    program: Program, mesh: Any, *, slices: int | None = None
) -> tuple[CollectiveUse, ...]:
    """The collectives of a program between slices, over the slower network.

    Args:
        program: a compiled program of JAX, the text of one (`xs.program_text(step)` of a torch
            step), or a report of `estimate`.
        mesh: over all of its devices, in their order, as `iso.hybrid_mesh` makes it.
        slices: how many slices there are, for devices without a slice index: virtual ones, which
            `hybrid_mesh` divides into equal groups.

    Returns:
        With bytes of one device, count, and the line of your code; those that send most first. A
        collective along an axis that spans slices is not included if each of its groups is in one
        slice.

    Raises:
        TypeError: `program` is not a program.
        ShardingError: `mesh` is not a mesh, or has no such slices.

    Example:
        >>> from isoshard import hybrid_mesh
        >>> crossings("HloModule nothing", hybrid_mesh((4,), (2,), ("x",)), slices=2)
        ()
    """
    mesh = as_mesh(mesh)
    if isinstance(program, Report):
        result = program.collectives
    else:
        text = program if isinstance(program, str) else getattr(program, "as_text", lambda: None)()
        if text is None:
            raise TypeError(
                "program must be jax.jit(f).lower(..).compile(), HLO text such as "
                f"xs.program_text(step), or a Report, not {type(program).__name__}"
            )
        ops = device_ops(parsed(text), mesh, {}, slices=slices) if "ENTRY" in text else ()
        result = collectives_of(ops, mesh, slices)
    crossing = [use for use in result if use.slices > 1]
    return tuple(sorted(crossing, key=lambda use: (-use.bytes * use.count, use.kind, use.line)))


def check_crossings(
    program: Program, mesh: Any, plan: Plan, *, slices: int | None = None
) -> tuple[CollectiveUse, ...]:
    """Check that a program's collectives between slices are those its plan allows: `Plan(dcn=..)`.

    Args:
        program: as for `crossings`.
        mesh: over all of its devices, in their order.
        plan: its `dcn` lists the kinds of collectives that may use the slower network, by axis. A
            plan without it allows none.
        slices: as for `crossings`.

    Returns:
        The collectives between slices.

    Raises:
        PlanError: the plan does not allow some of them; all of those are listed.
        TypeError: `program` is not a program.
        ShardingError: `mesh` is not a mesh, or has no such slices.

    Example:
        >>> from isoshard import hybrid_mesh
        >>> mesh = hybrid_mesh((4,), (2,), ("x",))
        >>> check_crossings("HloModule nothing", mesh, Plan(dcn={"x": "all-reduce"}), slices=2)
        ()
    """
    mesh = as_mesh(mesh)
    result, crossing = crossings(program, mesh, slices=slices), slice_axes(mesh, slices)
    allowed = plan.over_dcn()
    wrong = [
        (use, axes)
        for use in result
        if (axes := [a for a in use.axes if a in crossing and use.kind not in allowed.get(a, ())])
    ]
    if wrong:
        raise PlanError(_complaint(wrong, crossing, allowed))
    return result


def _complaint(
    wrong: list[tuple[CollectiveUse, list[str]]],
    crossing: dict[str, int],
    allowed: dict[str, tuple[str, ...]],
) -> str:
    axes = ", ".join(f"{name!r} ({count} slices)" for name, count in crossing.items())
    allowed_text = ", ".join(f"{name!r}: {' and '.join(kinds)}" for name, kinds in allowed.items())
    lines = [
        f"  {use.kind} over {axes_text(use)}: {use.count} x {human_bytes(use.bytes)} a device"
        f"{f', {use.line}' if use.line else ''}"
        for use, _ in wrong
    ]
    first, missing = wrong[0]
    fix = {name: tuple(dict.fromkeys((*allowed.get(name, ()), first.kind))) for name in missing}
    return "\n".join(
        [
            f"the program has collectives between slices, along {axes}, that the plan does not "
            f"allow (it allows {allowed_text or 'none'}):",
            *lines,
            "Shard along axes within a slice, put the slices on another axis "
            f"(iso.hybrid_mesh(ici, dcn, names)), or allow them: Plan(dcn={fix!r}).",
        ]
    )
