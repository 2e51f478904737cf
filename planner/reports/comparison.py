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

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from isoshard.core.kit import count_of, human_bytes, human_seconds, percent

from . import html_report
from .key_figures import ROLES, limit, traffic
from .report import Report
from .svg_pictures import axes_of, axis_fill, memory_bars, time_bars

Better = Literal["less", "more", ""]
ROWS: tuple[tuple[str, Callable[[Report], str], Callable[[Report], float] | None, Better], ...] = (
    ("machine", lambda one: one.topology, None, ""),
    ("mesh", lambda one: " x ".join(f"{n}={s}" for n, s in one.mesh.items()), None, ""),
    ("depth", lambda one: one.depth, None, ""),
    ("fits", lambda one: "yes" if one.fits else "no", None, ""),
    ("peak", lambda one: human_bytes(one.memory.peak), lambda one: one.memory.peak, "less"),
    ("used", lambda one: percent(one.memory.peak, one.memory.capacity), None, ""),
    ("parameters", lambda one: human_bytes(one.memory.parameters), None, ""),
    ("optimizer", lambda one: human_bytes(one.memory.optimizer), None, ""),
    ("activations", lambda one: human_bytes(one.memory.activations), None, ""),
    (
        "step",
        lambda one: human_seconds(one.time.overlapped),
        lambda one: one.time.overlapped,
        "less",
    ),
    (
        "not overlapped",
        lambda one: human_seconds(one.time.serial),
        lambda one: one.time.serial,
        "less",
    ),
    ("computing", lambda one: human_seconds(one.time.busy), None, ""),
    ("sent a step", lambda one: human_bytes(_sent(one)), lambda one: _sent(one), "less"),
    (
        "utilised",
        lambda one: percent(one.time.utilisation, 1),
        lambda one: one.time.utilisation,
        "more",
    ),
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
        """What sets them apart, in words."""
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
        frame = box.ASCII2 if console.options.ascii_only else box.SIMPLE_HEAD
        table = Table("", box=frame, pad_edge=False, show_edge=False)
        for name in self.reports:
            table.add_column(Text(name), justify="right", overflow="fold")
        for what, cells, best in _rows(self.reports):
            styled = [Text(text, "bold green" if at in best else "") for at, text in cells]
            table.add_row(Text(what, "dim"), *styled)
        console.print(table)
        console.print(Text(f"\n{self.difference}"))

    def to_html(self) -> str:
        """The reports side by side as one fragment of HTML, as of `Report.to_html`."""
        pairs = list(self.reports.items())
        head = "".join(f'<th class="number">{escape(name)}</th>' for name in self.reports)
        body = "".join(
            f'<tr><td class="dim">{escape(what)}</td>'
            + "".join(
                f'<td class="number{" best" if at in best else ""}">{escape(text)}</td>'
                for at, text in cells
            )
            + "</tr>"
            for what, cells, best in _rows(self.reports)
        )
        plans = "".join(
            f"<tr><td>{escape(name)}</td><td><code>{escape(pair.plan)}</code></td></tr>"
            for name, pair in pairs
        )
        roles = html_report.legend([(f"fill-{role}", role) for role in ROLES])
        names = axes_of(list(self.reports.values()))
        along = [(axis_fill(names, name), f"collectives over {name}") for name in names]
        axes = html_report.legend(
            [("fill-compute", "computing"), *along, ("fill-axes", "over several axes")]
        )
        title = next(iter(self.reports.values())).step
        return html_report.wrapped(
            f"<h2>{escape(title)}: {count_of(len(pairs), 'plan')} side by side</h2>",
            f"<p>{escape(self.difference)}</p>",
            f"<section><h3>Memory of one device</h3>{memory_bars(pairs)}{roles}</section>",
            f"<section><h3>Time of one step</h3>{time_bars(pairs)}{axes}</section>",
            '<section><h3>Numbers</h3><div class="wide"><table>'
            f"<tr><th></th>{head}</tr>{body}</table></div></section>",
            f'<section><h3>Plans</h3><div class="wide"><table>{plans}</table></div></section>',
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
    """Read reports that lie side by side.

    Raises:
        ValueError: the text is none, or one of its reports is none or of another version.
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
        reports: by name, or in a row; then they are called by their plans, or by number where plans
            are long or alike.

    Returns:
        What prints and shows itself as a table, and says the difference in words.

    Raises:
        ValueError: there is no report.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from isoshard.planner.estimating import estimate
        >>> from isoshard.planner.machine.topologies import topology
        >>> w = jax.ShapeDtypeStruct((8192, 8192), "float32")
        >>> mesh = topology("v5e:2x2").mesh((4,), ("x",))
        >>> plans = {"whole": (), "rows": ("x", None)}
        >>> found = {name: estimate(jnp.dot, (w, w), mesh, plan) for name, plan in plans.items()}
        >>> str(compare(found)).splitlines()[0].split()
        ['whole', 'rows']
    """
    if not reports:
        raise ValueError("there is nothing to compare: give at least one report")
    if isinstance(reports, Mapping):
        return Comparison(dict(reports))
    plans = [report.plan for report in reports]
    if len(set(plans)) == len(plans) and max(map(len, plans)) <= 32:
        return Comparison(dict(zip(plans, reports, strict=True)))
    return Comparison({f"plan {index}": report for index, report in enumerate(reports, 1)})


def _sent(report: Report) -> int:
    return sum(use.bytes for use in traffic(report))


def _rows(reports: Mapping[str, Report]) -> list[tuple[str, list[tuple[int, str]], set[int]]]:
    """Name, numbered cells, and the numbers of the best; of those that fit, if any does."""
    every = list(reports.values())
    allowed = [at for at, device in enumerate(every) if device.fits] or [*range(len(every))]
    rows = []
    for what, text, index, better in ROWS:
        best: set[int] = set()
        if index is not None and len(every) > 1:
            values = {at: index(every[at]) for at in allowed}
            top = min(values.values()) if better == "less" else max(values.values())
            best = {at for at, value in values.items() if value == top}
        if len(best) == len(every):
            best = set()
        rows.append((what, [(at, text(device)) for at, device in enumerate(every)], best))
    return rows


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
