"""What an estimate finds, in numbers: memory, collectives, time.

All bytes and seconds are of one device and one run of the step, unless they say otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

Depth = Literal["trace", "partition", "compile"]
"""How an estimate was made: from the traced program and the plan alone; by XLA's partitioner on
the host; by the target's own compiler."""


@dataclasses.dataclass(frozen=True)
class LiveArray:
    """One array that is alive where the memory is fullest.

    Attributes:
        name: of the input, or of the operation that computed it.
        shape: of one device's shard.
        dtype: name of its dtype.
        bytes: of one device's shard.
        line: the user's line that computed it, "file.py:12 (function)"; "" if unknown.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    line: str


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device.

    Attributes:
        parameters: of the model, trained.
        buffers: of the model, not trained.
        optimizer: its state.
        inputs: the batch, and numbers.
        activations: all else that is alive at the peak.
        peak: the most that is alive at once, all of the above.
        peak_line: the user's line at the peak; "" if unknown.
        largest: what is alive there, largest first.
        capacity: what one device has.
    """

    parameters: int
    buffers: int
    optimizer: int
    inputs: int
    activations: int
    peak: int
    peak_line: str
    largest: tuple[LiveArray, ...]
    capacity: int

    @property
    def fits(self) -> bool:
        """Whether the peak is at most the capacity."""
        return self.peak <= self.capacity


@dataclasses.dataclass(frozen=True)
class CollectiveUse:
    """Collectives of one kind along the same axes that come from one line.

    Attributes:
        kind: as HLO calls it: "all-gather", "all-reduce", "reduce-scatter", "all-to-all",
            "collective-permute".
        axes: the mesh axes along which devices communicate, in the mesh's order.
        bytes: of one result on one device, what a gather gathers or a reduction reduces.
        count: how often in one step.
        line: the user's line that it comes from.
        seconds: of all of them, if nothing overlaps.
        dtype: of what is sent.
        slices: how many slices the devices are in; several communicate over the slower
            network.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int
    line: str
    seconds: float = 0.0
    dtype: str = ""
    slices: int = 1


@dataclasses.dataclass(frozen=True)
class TimeEstimate:
    """Seconds of one step by a roofline.

    Attributes:
        compute: floating-point operations at the chip's peak rate times the reachable part.
        memory: bytes between memory and cores at the bandwidth.
        busy: of the two the larger, operation by operation.
        collectives: by axes, joined by "+" where several are talked along at once.
        serial: nothing overlaps: `busy` and all collectives.
        overlapped: collectives overlap with computing as far as the assumptions allow.
        utilisation: flops the model needs, over what the chip could do in `overlapped` (MFU).
        limit: "compute", "memory", or the axes of the collectives that take longest.
        assumptions: of the seconds, in words.
    """

    compute: float
    memory: float
    busy: float
    collectives: Mapping[str, float]
    serial: float
    overlapped: float
    utilisation: float
    limit: str
    assumptions: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TimelineEvent:
    """A stretch of the step, for pictures.

    Attributes:
        what: "compute" or the kind of a collective.
        axes: of a collective.
        start: seconds from the start of the step, without overlap.
        seconds: how long.
        memory: bytes alive on a device then.
        line: the user's line that most of it comes from.
    """

    what: str
    axes: tuple[str, ...]
    start: float
    seconds: float
    memory: int
    line: str


@dataclasses.dataclass(frozen=True)
class InputUse:
    """Inputs of a step of one role and dtype, split in one way.

    Attributes:
        role: as of a `StepInput`: "parameter", "buffer", "optimizer", "input", "random", "number".
        dtype: name of the dtype.
        axes: the mesh axes that split it, in the mesh's order; () if it is replicated.
        free: axes of the mesh that do not split it, and could: each array of it has an axis that
            they divide.
        bytes: on one device, all of its arrays.
        count: how many arrays.
    """

    role: str
    dtype: str
    axes: tuple[str, ...]
    free: tuple[str, ...]
    bytes: int
    count: int
