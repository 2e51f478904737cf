"""What one device does in one step, as a list: what every depth of an estimate ends in.

Times, timelines and the table of collectives are made of it, in one way for all depths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..reports.report import MemoryEstimate


@dataclasses.dataclass(frozen=True)
class DeviceOp:
    """One operation of one device, or many that run one after the other from one line.

    Attributes:
        name: the primitive, or HLO's name of the operation; of a collective its kind as HLO says
            it, "all-gather".
        line: the user's line that it comes from; "" if none is known.
        flops: of one run.
        bytes: moved between memory and cores, of one run.
        dtype: name of the dtype that it computes in, or sends.
        times: how often one step runs it.
        axes: of a collective, the mesh axes along which devices talk; () of all others.
        sent: of a collective, bytes of its result on one device (of a reduce-scatter: of its
            operand), as XLA's cost models count them; 0 of all others.
        live: bytes that are alive on the device while it runs; 0 if it is not known.
        scope: of the loop that it runs in, a number that its operations share; 0 outside of loops.
        waits: of a collective in a loop, whether its operand is computed in the same run of the
            loop (activations), so that it cannot start a run earlier, as one of what the loop is
            given can (weights).
        reordered: bytes that are read or written to lie in another order in memory; those of an
            operation are among `bytes`, those of a collective are besides.
        slices: of a collective, in how many slices the devices are that talk; 0: as its axes say.
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
        """Whether devices talk in it."""
        return bool(self.axes)


@dataclasses.dataclass(frozen=True)
class DeviceProgram:
    """One device's part of a step.

    Attributes:
        ops: in the order in which they run.
        memory: what is alive.
        notes: in words, what it stands on and what is not exact about it.
        versions: of jax, jaxlib and the compiler, of a program that was compiled.
        findings: in words, what the plan does to the step that its user should know.
    """

    ops: tuple[DeviceOp, ...]
    memory: MemoryEstimate
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    findings: tuple[str, ...] = ()
