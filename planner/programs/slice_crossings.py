"""What a program sends from slice to slice, and whether its plan says that it may.

>>> import jax, jax.numpy as jnp
>>> from isoshard import P, hybrid_mesh, shard
>>> mesh = hybrid_mesh((1, 4), (2, 1), ("replica", "model"))     # two slices of four devices
>>> x, w = shard(jnp.ones((8, 16)), mesh, P("replica")), shard(jnp.ones((16, 8)), mesh, P())
>>> program = jax.jit(jax.grad(lambda w, x: (x @ w).sum())).lower(w, x).compile()
>>> for one in crossings(program, mesh, slices=2):
...     print(one.kind, one.axes, one.slices, one.bytes, one.count)
all-reduce ('replica',) 2 512 1
>>> found = check_crossings(program, mesh, Plan(dcn={"replica": "all-reduce"}), slices=2)

Under a plan that does not say so it is a `PlanError`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from jax.sharding import Mesh

from isoshard.core.kit import Plan, PlanError, as_mesh, human_bytes, parsed, slice_axes, slices_over

from ..costs.device_program import DeviceOp
from ..reports.findings import CollectiveUse
from ..reports.key_figures import axes_text
from ..reports.report import Report
from .device_ops import device_ops


class CompiledProgram(Protocol):
    """What has its text: `jax.jit(f).lower(..).compile()`."""

    def as_text(self) -> str | None:
        """The optimised HLO."""
        ...


Program = Report | CompiledProgram | str


def counted(
    ops: Iterable[DeviceOp], mesh: Mesh, slices: int | None = None
) -> tuple[CollectiveUse, ...]:
    """The collectives among operations, by kind, axes, size and line; without seconds."""
    counts: dict[tuple[Any, ...], int] = {}
    for op in ops:
        if op.is_collective:
            among = op.slices or slices_over(mesh, op.axes, slices)
            key = (op.name, op.axes, op.sent, op.line, op.dtype, among)
            counts[key] = counts.get(key, 0) + op.times
    return tuple(
        CollectiveUse(kind, axes, sent, count, line, 0.0, dtype, among)
        for (kind, axes, sent, line, dtype, among), count in counts.items()
    )


def crossings(
    program: Program, mesh: Any, *, slices: int | None = None
) -> tuple[CollectiveUse, ...]:
    """The collectives of a program that go from slice to slice, over the slower network.

    Args:
        program: a compiled program of JAX, the text of one (`xs.program_text(step)` of a torch
            step), or a report of `estimate`.
        mesh: over all of its devices, in their order, as `iso.hybrid_mesh` makes it.
        slices: how many slices there are, for devices that know none: virtual ones, which
            `hybrid_mesh` divides into equal groups.

    Returns:
        With bytes of one device, count, and the line of your code; those that send most first. A
        collective along an axis that goes from slice to slice is left out if those that talk are
        in one slice.

    Raises:
        TypeError: `program` is none.
        ShardingError: `mesh` is no mesh, or has no such slices.

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
                "a program is what jax.jit(f).lower(..).compile() gives, the text of one, such as "
                f"xs.program_text(step), or a Report; given was {type(program).__name__}"
            )
        ops = device_ops(parsed(text), mesh, {}, slices=slices) if "ENTRY" in text else ()
        result = counted(ops, mesh, slices)
    crossing = [one for one in result if one.slices > 1]
    return tuple(sorted(crossing, key=lambda one: (-one.bytes * one.count, one.kind, one.line)))


def check_crossings(
    program: Program, mesh: Any, plan: Plan, *, slices: int | None = None
) -> tuple[CollectiveUse, ...]:
    """Check that a program sends from slice to slice only what its plan says: `Plan(dcn=..)`.

    Args:
        program: as for `crossings`.
        mesh: over all of its devices, in their order.
        plan: says by `dcn` which kinds of collectives may go over the slower network, along which
            axes. A plan that says nothing allows none.
        slices: as for `crossings`.

    Returns:
        What goes from slice to slice.

    Raises:
        PlanError: something does that the plan does not say; all of it is listed.
        TypeError: `program` is none.
        ShardingError: `mesh` is no mesh, or has no such slices.

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
        (one, axes)
        for one in result
        if (axes := [a for a in one.axes if a in crossing and one.kind not in allowed.get(a, ())])
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
    join = ", ".join(f"{name!r}: {' and '.join(kinds)}" for name, kinds in allowed.items())
    lines = [
        f"  {one.kind} over {axes_text(one)}: {one.count} x {human_bytes(one.bytes)} a device"
        f"{f', {one.line}' if one.line else ''}"
        for one, _ in wrong
    ]
    first, missing = wrong[0]
    fix = {name: tuple(dict.fromkeys((*allowed.get(name, ()), first.kind))) for name in missing}
    return "\n".join(
        [
            f"what goes from slice to slice, along {axes}, is more than the plan says "
            f"({join or 'nothing'}):",
            *lines,
            "Split what is sent along axes that stay in a slice, put the slices on another axis "
            f"(iso.hybrid_mesh(ici, dcn, names)), or say that it may: Plan(dcn={fix!r}).",
        ]
    )
