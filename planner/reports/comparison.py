"""Reports side by side: plans of one step, or machines for it.

>>> from isoshard.planner.reports.findings import MemoryEstimate, TimeEstimate
>>> from isoshard.planner.reports.report import Report
>>> def planned(plan, peak, seconds):
...     memory = MemoryEstimate(0, 0, 0, 0, peak, peak, "", (), 16 << 30)
...     time = TimeEstimate(seconds, 0.0, seconds, {}, seconds, seconds, 0.5, "compute")
...     return Report("step", "jax", "trace", "v5e:4x4", {"x": 16}, plan, memory, (), 0, 0, time)
>>> both = compare({"a": planned("A", 8 << 30, 0.2), "b": planned("B", 24 << 30, 0.1)})
>>> print(both.difference)
b does not fit, by 8.0 GiB. Of those that fit, a is fastest, 200 ms.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from isoshard.core.kit import count_of, human_bytes, human_seconds, percent

from . import html_report, svg_pictures
from .key_figures import (
    ROLES,
    Bar,
    Table,
    axis_kind,
    limit,
    memory_rows,
    mesh_text,
    traffic,
)
from .report import Report
from .terminal_report import rich_table

Better = Literal["less", "more", ""]
ROWS: tuple[tuple[str, Callable[[Report], str], Callable[[Report], float] | None, Better], ...] = (
    ("machine", lambda report: report.topology, None, ""),
    ("mesh", mesh_text, None, ""),
    ("depth", lambda report: report.depth, None, ""),
    ("fits", lambda report: "yes" if report.fits else "no", None, ""),
    ("peak", lambda r: human_bytes(r.memory.peak), lambda r: r.memory.peak, "less"),
    ("used", lambda report: percent(report.memory.peak, report.memory.capacity), None, ""),
    ("parameters", lambda report: human_bytes(report.memory.parameters), None, ""),
    ("optimizer", lambda report: human_bytes(report.memory.optimizer), None, ""),
    ("activations", lambda report: human_bytes(report.memory.activations), None, ""),
    ("step", lambda r: human_seconds(r.time.overlapped), lambda r: r.time.overlapped, "less"),
    ("not overlapped", lambda r: human_seconds(r.time.serial), lambda r: r.time.serial, "less"),
    ("computing", lambda report: human_seconds(report.time.busy), None, ""),
    ("sent a step", lambda r: human_bytes(_bytes_sent(r)), lambda r: _bytes_sent(r), "less"),
    ("utilised", lambda r: percent(r.time.utilisation, 1), lambda r: r.time.utilisation, "more"),
    ("limited by", limit, None, ""),
)
"""What is compared: name, text, number if there is a best, and which is better."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Several reports, by name.

    Attributes:
        reports: in the order of their columns.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from isoshard.planner.estimating import estimate
        >>> from isoshard.planner.machine.topologies import topology
        >>> w = jax.ShapeDtypeStruct((8192, 8192), "float32")
        >>> meshes = {name: topology(name).mesh((4,), ("x",)) for name in ("v5e:2x2", "h100:1x4")}
        >>> both = compare({name: estimate(jnp.dot, (w, w), mesh) for name, mesh in meshes.items()})
        >>> list(both.reports)
        ['v5e:2x2', 'h100:1x4']
    """

    reports: Mapping[str, Report]

    @property
    def difference(self) -> str:
        """How they differ, in words."""
        difference = [
            f"{name} does not fit, by {human_bytes(report.memory.peak - report.memory.capacity)}."
            for name, report in self.reports.items()
            if not report.fits
        ]
        fitting = {name: report for name, report in self.reports.items() if report.fits}
        if not fitting:
            return " ".join([*difference, "None fits."])
        order = sorted(fitting, key=lambda name: fitting[name].time.overlapped)
        first = order[0]
        seconds = human_seconds(fitting[first].time.overlapped)
        which = "Of those that fit, " if difference and len(fitting) < len(self.reports) else ""
        difference.append(f"{which}{first} is fastest, {seconds}.")
        difference += [_against(name, fitting[name], first, fitting[first]) for name in order[1:]]
        return " ".join(difference)

    def __str__(self) -> str:
        """The table, and the difference in words."""
        written = io.StringIO()
        self.show(console=Console(file=written, width=100, color_system=None))
        return written.getvalue().rstrip()

    def show(self, *, width: int | None = None, console: Console | None = None) -> None:
        """Print the reports side by side, the best of a row in green.

        Args:
            width: columns to fit into; None: those of the terminal.
            console: where to; None: standard output.
        """
        console = console or Console(width=width)
        drawn = rich_table([""], console)
        for name in self.reports:
            drawn.add_column(Text(name), justify="right", overflow="fold")
        cells, best = _cells(self.reports)
        for row, (name, *texts) in enumerate(cells):
            styled = [
                Text(text, "bold green" if (row, column) in best else "")
                for column, text in enumerate(texts, 1)
            ]
            drawn.add_row(Text(name, "dim"), *styled)
        console.print(drawn)
        console.print(Text(f"\n{self.difference}"))

    def to_html(self) -> str:
        """The reports side by side as one fragment of HTML, as of `Report.to_html`."""
        reports = list(self.reports.values())
        axes = list(dict.fromkeys(axis for report in reports for axis in report.mesh))
        memory = [(name, _memory_bars(report)) for name, report in self.reports.items()]
        times = [(name, _time_bars(report, axes)) for name, report in self.reports.items()]
        limits = [report.memory.capacity for report in reports]
        along = [(axis_kind(axes, name), f"collectives over {name}") for name in axes]
        colours = [("compute", "computing"), *along, ("axes", "over several axes")]
        cells, best = _cells(self.reports)
        figures = Table(("", *self.reports), tuple(map(tuple, cells)))
        plans = Table(("", "plan"), tuple((n, report.plan) for n, report in self.reports.items()))
        return html_report.wrapped(
            f"<h2>{escape(reports[0].step)}: {count_of(len(reports), 'plan')} side by side</h2>",
            f"<p>{escape(self.difference)}</p>",
            html_report.section(
                "Memory of one device",
                svg_pictures.chart(html_report.MEMORY, memory, svg_pictures.BYTES, limits)
                + html_report.legend([(role, role) for role in ROLES]),
            ),
            html_report.section(
                "Time of one step",
                svg_pictures.chart(html_report.TIME, times, svg_pictures.SECONDS)
                + html_report.legend(colours),
            ),
            html_report.section("Numbers", html_report.table(figures, list(self.reports), best)),
            html_report.section("Plans", html_report.table(plans)),
        )

    def _repr_html_(self) -> str:
        return self.to_html()

    def to_json(self) -> str:
        """All reports as JSON, by name; `comparison_from_json` reads them back."""
        reports = {name: json.loads(report.to_json()) for name, report in self.reports.items()}
        return json.dumps({"isoshard_reports": reports}, indent=1) + "\n"

    def write_html(self, path: str | os.PathLike[str], *, whole: bool = True) -> None:
        """Write a page.

        Args:
            path: of the file; one that is there is replaced.
            whole: with every report below the comparison.
        """
        content = self.to_html()
        if whole:
            content += "".join(report.to_html() for report in self.reports.values())
        Path(path).write_text(html_report.page("plans side by side", content), encoding="utf-8")


def comparison_from_json(text: str) -> Comparison:
    """Read a comparison from JSON.

    Raises:
        ValueError: the text is no comparison, or one of its reports is of another version.
    """
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"these are no reports: no JSON, {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("isoshard_reports"), dict):
        raise ValueError("these are no reports: there is no 'isoshard_reports'")
    reports = content["isoshard_reports"]
    return Comparison(
        {name: Report.from_json(json.dumps(report)) for name, report in reports.items()}
    )


def compare(reports: Mapping[str, Report] | Sequence[Report]) -> Comparison:
    """Put reports side by side.

    Args:
        reports: by name, or in a sequence; then their names are their plans, or numbers where
            plans are long or equal.

    Returns:
        A table that prints itself, with the difference in words.

    Raises:
        ValueError: there is no report.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from isoshard.planner.estimating import estimate
        >>> from isoshard.planner.machine.topologies import topology
        >>> w = jax.ShapeDtypeStruct((8192, 8192), "float32")
        >>> mesh = topology("v5e:2x2").mesh((4,), ("x",))
        >>> plans = {"replicated": (), "rows": ("x", None)}
        >>> reports = {name: estimate(jnp.dot, (w, w), mesh, plan) for name, plan in plans.items()}
        >>> str(compare(reports)).splitlines()[0].split()
        ['replicated', 'rows']
    """
    if not reports:
        raise ValueError("there is nothing to compare: give at least one report")
    if isinstance(reports, Mapping):
        return Comparison(dict(reports))
    plans = [report.plan for report in reports]
    if len(set(plans)) == len(plans) and max(map(len, plans)) <= 32:
        return Comparison(dict(zip(plans, reports, strict=True)))
    return Comparison({f"plan {index}": report for index, report in enumerate(reports, 1)})


def _bytes_sent(report: Report) -> int:
    return sum(use.bytes for use in traffic(report))


def _memory_bars(report: Report) -> tuple[Bar, ...]:
    """The roles one after the other."""
    *roles, _, _ = memory_rows(report)
    return tuple(dataclasses.replace(bar, text=f"{role} {bar.text}") for role, (bar,) in roles)


def _time_bars(report: Report, axes: Sequence[str]) -> tuple[Bar, ...]:
    """Computing and collectives, one after the other."""
    text = f"computing {human_seconds(report.time.busy)}"
    bars = [Bar(0.0, report.time.busy, "compute", text)]
    for use in traffic(report):
        start = bars[-1].start + bars[-1].size
        text = f"{use.axes} {human_seconds(use.seconds)}"
        bars.append(Bar(start, use.seconds, axis_kind(axes, use.axes), text))
    return tuple(bars)


def _cells(reports: Mapping[str, Report]) -> tuple[list[list[str]], set[tuple[int, int]]]:
    """Names and texts of `ROWS`, and (row, column) of the best; of those that fit, if any does."""
    every = list(reports.values())
    allowed = [n for n, report in enumerate(every) if report.fits] or [*range(len(every))]
    cells: list[list[str]] = []
    best: set[tuple[int, int]] = set()
    for row, (name, text, number, better) in enumerate(ROWS):
        if number is not None:
            values = {n: number(every[n]) for n in allowed}
            top = min(values.values()) if better == "less" else max(values.values())
            winners = {(row, n + 1) for n, value in values.items() if value == top}
            best |= winners if len(winners) < len(every) else set()
        cells.append([name, *(text(report) for report in every)])
    return cells, best


def _against(name: str, report: Report, first: str, best: Report) -> str:
    """How a slower report differs from the fastest."""
    slower = report.time.overlapped - best.time.overlapped
    if slower <= 0.005 * best.time.overlapped:
        against = f"{name} takes as long"
    else:
        against = f"{name} takes {human_seconds(slower)} more"
        reasons = _reasons(report, best)
        if reasons:
            against += f" ({', '.join(reasons)})"
    memory = report.memory.peak - best.memory.peak
    if abs(memory) > 0.01 * best.memory.peak:
        against += f", and {human_bytes(abs(memory))} {'more' if memory > 0 else 'less'} memory"
    return f"{against}."


def _reasons(report: Report, best: Report) -> list[str]:
    """Where a report spends more than another, the most first."""
    more = {"computing": report.time.busy - best.time.busy}
    axes = dict.fromkeys([*report.time.collectives, *best.time.collectives])
    for name in axes:
        extra = report.time.collectives.get(name, 0.0) - best.time.collectives.get(name, 0.0)
        more[f"collectives over {name}"] = extra
    large = [name for name in more if more[name] > 0.05 * best.time.overlapped]
    return [
        f"{name} +{human_seconds(more[name])}" for name in sorted(large, key=lambda n: -more[n])
    ]
