"""The operations of one device in one step: the result of every depth of an estimate.

Times, timelines and the table of collectives are computed from it, in one way for all depths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jax.sharding import Mesh

from isoshard.core.kit import slices_over

from ..reports.findings import CollectiveUse
from ..reports.report import MemoryEstimate


@dataclasses.dataclass(frozen=True)
class DeviceOp:
    """One operation of one device, or several consecutive ones of one line.

    Attributes:
        name: the primitive, or HLO's name of the operation; of a collective HLO's name of its
            kind, "all-gather".
        line: the user's line that it comes from; "" if it is not known.
        flops: of one run.
        bytes: moved between memory and cores, of one run.
        dtype: name of the dtype that it computes in, or sends.
        times: how often one step runs it.
        axes: of a collective, its mesh axes; () of all others.
        sent: of a collective, bytes of its result on one device (of a reduce-scatter: of its
            operand), as XLA's cost models count them; 0 of all others.
        live: bytes that are alive on the device while it runs; 0 if it is not known.
        scope: the id of the loop that it runs in; 0 outside of loops.
        waits: of a collective in a loop, whether its operand is computed in the same iteration
            (activations), so that it cannot start an iteration earlier, as one of an input of the
            loop can (weights).
        reordered: bytes read or written by copies to another layout; those of an operation are
            part of `bytes`, those of a collective are not.
        slices: of a collective, in how many slices the devices of a group are; 0: by its axes.
        fresh: bytes of memory that is new to the process, touched for the first time.
    """

    name: str
    line: str
    flops: float = 0.0
    bytes: float = 0.0
    dtype: str = "float32"
    times: int = 1
    axes: tuple[str, ...] = ()
    sent: int = 0
    live: int = 0
    scope: int = 0
    waits: bool = False
    fresh: int = 0
    reordered: float = 0.0
    slices: int = 0

    @property
    def is_collective(self) -> bool:
        """Whether it is a collective."""
        return bool(self.axes)


@dataclasses.dataclass(frozen=True)
class DeviceProgram:
    """The program of one device.

    Attributes:
        ops: in the order in which they run.
        memory: its memory.
        notes: assumptions and approximations, in words.
        versions: of jax, jaxlib and the compiler, of a program that was compiled.
        findings: effects of the plan that the user should know, in words.
    """

    ops: tuple[DeviceOp, ...]
    memory: MemoryEstimate
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    findings: tuple[str, ...] = ()


def collectives_of(
    ops: Iterable[DeviceOp], mesh: Mesh, slices: int | None = None
) -> tuple[CollectiveUse, ...]:
    """The collectives of a program by kind, axes, size and line; without seconds.

    Args:
        ops: of one device.
        mesh: over all devices.
        slices: how many slices they are in, for devices without a slice index.
    """
    counts: dict[tuple[Any, ...], int] = {}
    for op in ops:
        if op.is_collective:
            among = op.slices or slices_over(mesh, op.axes, slices)
            key = (op.name, op.axes, op.sent, op.line, op.dtype, among)
            counts[key] = counts.get(key, 0) + op.times
    return tuple(
        CollectiveUse(kind, axes, nbytes, count, line, 0.0, dtype, among)
        for (kind, axes, nbytes, line, dtype, among), count in counts.items()
    )
