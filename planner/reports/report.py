"""`Report`: what one step needs on one machine under one plan, and how it is shown and kept.

All bytes and seconds are of one device and one run of the step, unless they say otherwise. The
numbers are those of `findings.py`; other modules of this package write text, pages and JSON.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from . import html_report, json_report, terminal_report
from .findings import (
    CollectiveUse,
    Depth,
    InputUse,
    LiveArray,
    MemoryEstimate,
    TimeEstimate,
    TimelineEvent,
)
from .key_figures import summary

__all__ = [
    "CollectiveUse",
    "Depth",
    "InputUse",
    "LiveArray",
    "MemoryEstimate",
    "Report",
    "TimeEstimate",
    "TimelineEvent",
]


@dataclasses.dataclass(frozen=True)
class Report:
    """What one step needs on one machine under one plan.

    Attributes:
        step: name of the step.
        framework: in which it is written.
        depth: how it was estimated.
        topology: text of the machine.
        mesh: the axes of the mesh and their sizes, in order.
        plan: the plan, as it prints.
        memory: bytes on one device.
        collectives: each kind, axis and line.
        flops: of one device.
        bytes_moved: between memory and cores, of one device.
        time: seconds.
        advice: what would make it fit or run faster, in the order of what it saves.
        timeline: the step from its start to its end.
        seconds_taken: what the estimate itself took.
        versions: of jax, jaxlib and the compiler that it was made with.
        inputs: of the step, by role, dtype and the axes that split them.
        assumptions: of memory and collectives, in words; `time` has its own.

    Example:
        >>> memory = MemoryEstimate(
        ...     parameters=2 << 30, buffers=0, optimizer=4 << 30, inputs=0, activations=6 << 30,
        ...     peak=12 << 30, peak_line="", largest=(), capacity=16_000_000_000,
        ... )
        >>> time = TimeEstimate(0.2, 0.1, 0.2, {"data": 0.05}, 0.25, 0.2, 0.6, "compute")
        >>> report = Report(
        ...     "train", "jax", "trace", "v5e:4x4", {"data": 16}, "Plan.fsdp('data')", memory, (),
        ...     4e13, 8e10, time,
        ... )
        >>> print(report)
        train on v5e:4x4 (data=16): fits, 12.0 GiB of 14.9 GiB (81 %); 200 ms, 60 % utilised, \
limited by compute
        >>> Report.from_json(report.to_json()) == report
        True
    """

    step: str
    framework: str
    depth: Depth
    topology: str
    mesh: Mapping[str, int]
    plan: str
    memory: MemoryEstimate
    collectives: tuple[CollectiveUse, ...]
    flops: float
    bytes_moved: float
    time: TimeEstimate
    advice: tuple[str, ...] = ()
    timeline: tuple[TimelineEvent, ...] = ()
    seconds_taken: float = 0.0
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    inputs: tuple[InputUse, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether one device has the memory."""
        return self.memory.fits

    def __str__(self) -> str:
        """One line: what, where, whether it fits, how long."""
        return summary(self)

    def show(self, *, width: int | None = None, console: Console | None = None) -> None:
        """Print the report: memory, its peak, collectives, time, the mesh, advice.

        Args:
            width: columns to fit into; None: those of the terminal.
            console: where to; None: standard output, in colour if it is a terminal.
        """
        terminal_report.show(self, console or Console(width=width))

    def to_html(self) -> str:
        """The report as one fragment of HTML, with its style and pictures inside.

        Returns:
            A `div`; it loads nothing, and follows the reader's light or dark theme.
        """
        return html_report.fragment(self)

    def _repr_html_(self) -> str:
        return html_report.fragment(self)

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as a page.

        Args:
            path: of the file; one that is there is replaced.
        """
        title = f"{self.step} on {self.topology}"
        Path(path).write_text(html_report.page(title, self.to_html()), encoding="utf-8")

    def to_json(self) -> str:
        """The report as JSON, with the version of its format.

        Returns:
            Text that `from_json` reads back into an equal report.
        """
        return json_report.written(self)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read a report.

        Args:
            text: as `to_json` gives it.

        Returns:
            A report equal to the one written.

        Raises:
            ValueError: the text is no report, lacks something, or is of another version.
        """
        return json_report.read(cls, text)
