"""A report as text, for a terminal of any width: memory, its peak, collectives, time, mesh, advice.

Rich leaves colours out where there is no terminal; where the encoding has no blocks, bars are of
`#`, and frames of `+`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from isoshard.core.kit import Cell, grid_lines, percent

from . import key_figures
from .key_figures import Row, Table, heading, mesh_lines, origin

if TYPE_CHECKING:
    from .report import Report


MAX_COLLECTIVES = 16
"""Rows of the table of collectives; the others are summed up in one."""
MAX_LIVE = 8
"""Arrays listed at the peak."""
NARROW = 72
"""Columns below which a row of a table is a line of text."""
STYLES = {
    "parameters": "blue",
    "buffers": "cyan",
    "optimizer": "yellow",
    "inputs": "green",
    "activations": "magenta",
    "other": "bright_black",
    "compute": "blue",
}
RIGHT = frozenset({"bytes", "seconds", "count", "bytes each"})
"""Columns of tables that are aligned to the right."""
NAMED = frozenset({"count", "bytes each"})
"""Columns whose cells need their name where a row is a line of text."""
_GRID = 4  # devices drawn along an axis of the mesh


def show(report: Report, console: Console) -> None:
    """Print a report."""
    for section in sections(report, console):
        console.print(section)


def sections(report: Report, console: Console) -> Iterator[RenderableType]:
    """The texts and tables of a report, in order."""
    memory, good = report.memory, "green" if report.fits else "red"
    plan = report.plan
    most = 3 * console.width
    yield Text(heading(report), style="bold")
    yield Text.assemble(("plan ", "dim"), plan if len(plan) <= most else f"{plan[: most - 2]}..")
    yield Text(key_figures.fit_text(report), style=f"bold {good}")
    yield _title("Memory of one device")
    after = {"peak": percent(memory.peak, memory.capacity)}
    yield from _chart(key_figures.memory_rows(report), console, good, after)
    where = f" at {memory.peak_line}" if memory.peak_line else ""
    if memory.largest:
        yield _title(f"Peak{where}: the largest arrays alive, of one device")
        yield from _table(key_figures.live_arrays(report, MAX_LIVE), console)
    elif where:
        yield _title(f"Peak{where}")
    if report.collectives:
        total = sum(use.count for use in report.collectives)
        yield _title(f"Collectives of one step: {total:,}")
        yield from _table(key_figures.collectives(report, MAX_COLLECTIVES), console)
    else:
        yield _title("No collectives: the devices do not talk")
    yield _title("Time of one step")
    yield from _chart(key_figures.time_rows(report), console, "green")
    first, *assumed = key_figures.time_sentences(report)
    yield Text(first)
    yield from (Text(text, style="dim") for text in assumed)
    yield _title("Mesh, and what a step sends along its axes")
    yield from _mesh(report, console)
    if report.advice:
        yield _title("What would help")
        grid = RichTable.grid(padding=(0, 1))
        for sentence in report.advice:
            grid.add_row("-", Text(sentence))
        yield grid
    yield Text(f"\n{origin(report)}", style="dim")


def bar(start: float, length: float, width: int, console: Console) -> str:
    """A bar in characters.

    Args:
        start: where it begins, as a share of the width.
        length: its share of the width; of less than half a character a thin line is drawn.
        width: characters of the chart.
        console: for its encoding.
    """
    full, thin = ("#", "|") if console.options.ascii_only else ("█", "▏")
    first = min(round(start * width), width - 1)
    count = min(round((start + length) * width), width) - first
    return " " * first + (full * count if count > 0 else thin if length > 0 else "")


def rich_table(columns: Sequence[str], console: Console) -> RichTable:
    """An empty table; numbers are aligned to the right, and lines folded."""
    frame = box.ASCII2 if console.options.ascii_only else box.SIMPLE_HEAD
    table = RichTable(box=frame, pad_edge=False, show_edge=False, header_style="dim")
    for name in columns:
        fold = name == "line"
        table.add_column(
            name,
            justify="right" if name in RIGHT else "left",
            no_wrap=not fold,
            overflow="fold" if fold else "ellipsis",
        )
    return table


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _chart(
    rows: Sequence[Row], console: Console, good: str, after: dict[str, str] | None = None
) -> Iterator[Text]:
    """Bars with label and size; `after` has texts behind the bars of some rows."""
    width = max(6, console.width - 11 - 10 - 6 - 5)
    full = max(max(bar.start + bar.size for _, bars in rows for bar in bars), 1e-12)
    for name, (first, *_) in rows:
        drawn = bar(first.start / full, first.size / full, width, console)
        text = (after or {}).get(name, "")
        label = name if len(name) <= 11 else f"{name[:9]}.."
        style = good if first.kind == "peak" else STYLES.get(first.kind, "magenta")
        drawn = f"{drawn:<{width}}" if text else drawn
        line = Text.assemble(f"{label:<11}{first.text:>10}  ", (drawn, style), f" {text}".rstrip())
        yield _cropped(line)


def _table(table: Table, console: Console) -> Iterator[RenderableType]:
    if console.width < NARROW:
        for *cells, line in table.rows:
            names = [f"{name} " if name in NAMED else "" for name in table.columns]
            cells = [f"{name}{cell}" for name, cell in zip(names, cells, strict=False)]
            yield Text.assemble(", ".join(cells), (f"\n  {line}" if line else "", "dim"))
    else:
        drawn = rich_table(table.columns, console)
        for row in table.rows:
            drawn.add_row(*map(Text, row))
        yield drawn
    if table.rest:
        yield Text(table.rest, style="dim")


def _mesh(report: Report, console: Console) -> Iterator[Text]:
    """The axes with their traffic, and the last two as a grid, coloured by host or slice."""
    right, down = (">", "v") if console.options.ascii_only else ("→", "↓")
    lines = mesh_lines(report)
    arrows = [*" " * (len(lines) - 2), down, right][-len(lines) :] if lines else []
    for arrow, line in zip(arrows, lines, strict=True):
        yield Text(f"{arrow} {line}")
    if console.options.ascii_only or not lines:
        return
    near = key_figures.slices(report)
    rows, columns = map(_shown, near.shape)

    def cell(row: int | None, column: int | None) -> Cell:
        if row is None or column is None:
            return "…", -1
        return str(row * near.shape[1] + column), int(near[row, column])

    cells = [[cell(row, column) for column in columns] for row in rows]
    for line in grid_lines(cells, [""] * len(rows), [""] * len(columns), console.width):
        yield _cropped(Text.assemble(*line))


def _shown(count: int) -> Sequence[int | None]:
    return [*range(count)] if count <= _GRID else [0, 1, None, count - 1]


def _cropped(line: Text) -> Text:
    line.no_wrap, line.overflow = True, "ellipsis"
    return line
