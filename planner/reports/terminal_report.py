"""A report as text, for a terminal of any width: memory, its peak, collectives, time, mesh, advice.

Rich leaves colours out where there is no terminal; where the encoding has no blocks, bars are of
`#`, and frames of `+`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from isoshard.core.kit import (
    Cell,
    count_of,
    grid_lines,
    human_bytes,
    human_flops,
    human_seconds,
    percent,
)

from .key_figures import along, borders, by_cost, limit, mesh_of, shares, traffic, verdict, wiring

if TYPE_CHECKING:
    from .report import Report


MAX_COLLECTIVES = 16
"""Rows of the table of collectives; the others are summed up in one."""
MAX_LIVE = 8
"""Arrays listed at the peak."""
NARROW = 72
"""Columns below which tables leave out what is least needed."""
STYLES = {
    "parameters": "blue",
    "buffers": "cyan",
    "optimizer": "yellow",
    "inputs": "green",
    "activations": "magenta",
    "other": "bright_black",
}
Column = tuple[str, Literal["left", "right"]]
_GRID = 4  # devices drawn along an axis of the mesh


def show(report: Report, console: Console) -> None:
    """Print a report."""
    for section in sections(report, console):
        console.print(section)


def sections(report: Report, console: Console) -> Iterator[RenderableType]:
    """The texts and tables of a report, in order."""
    yield _title(report, console.width)
    yield _memory(report, console)
    yield from _peak(report, console)
    yield from _collectives(report, console)
    yield _time(report, console)
    yield _mesh(report, console)
    yield from _advice(report)
    yield _origin(report)


def bar(start: float, length: float, width: int, console: Console) -> str:
    """A bar in characters.

    Args:
        start: where it begins, as a share of the width.
        length: its share of the width; of less than half a character a thin line is drawn.
        width: characters of the whole.
        console: for its encoding.
    """
    full, thin = ("#", "|") if console.options.ascii_only else ("█", "▏")
    first = min(round(start * width), width - 1)
    count = min(round((start + length) * width), width) - first
    return " " * first + (full * count if count > 0 else thin if length > 0 else "")


def verdict_text(report: Report) -> Text:
    """Whether it fits, green or red."""
    return Text(verdict(report), style="bold green" if report.fits else "bold red")


def _title(report: Report, width: int) -> Text:
    axes = " x ".join(f"{name}={size}" for name, size in report.mesh.items())
    devices = count_of(int(np.prod(list(report.mesh.values()))), "device")
    return Text.assemble(
        (report.step, "bold"),
        f" ({report.framework}) on {report.topology}: {axes}, {devices}, depth {report.depth!r}\n",
        ("plan ", "dim"),
        f"{_shortened(report.plan, 3 * width)}\n",
        verdict_text(report),
    )


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: max(most - 2, 0)]}.."


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _memory(report: Report, console: Console) -> RenderableType:
    memory, width = report.memory, console.width
    room = max(6, width - 11 - 10 - 6 - 5)
    full = max(memory.capacity, memory.peak, 1)
    lines, at = [_heading("Memory of one device")], 0
    for role, size in shares(memory):
        drawn = bar(at / full, size / full, room, console)
        lines.append(_bar_line(role, human_bytes(size), drawn, STYLES[role], ""))
        at += size
    style = "green" if memory.fits else "red"
    drawn = bar(0, memory.peak / full, room, console)
    share = percent(memory.peak, memory.capacity)
    lines.append(_bar_line("peak", human_bytes(memory.peak), f"{drawn:<{room}}", style, share))
    drawn = bar(0, memory.capacity / full, room, console)
    lines.append(_bar_line("capacity", human_bytes(memory.capacity), drawn, "bright_black", ""))
    return Group(*(_cropped(line) for line in lines))


def _bar_line(label: str, index: str, drawn: str, style: str, after: str) -> Text:
    return Text.assemble(f"{label:<11}", f"{index:>10}  ", (drawn, style), f" {after}".rstrip())


def _cropped(line: Text) -> Text:
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _peak(report: Report, console: Console) -> Iterator[RenderableType]:
    memory = report.memory
    where = f" at {memory.peak_line}" if memory.peak_line else ""
    if not memory.largest:
        if where:
            yield _heading(f"Peak{where}")
        return
    yield _heading(f"Peak{where}: the largest arrays alive, of one device")
    shown, rest = memory.largest[:MAX_LIVE], memory.largest[MAX_LIVE:]
    if console.width < NARROW:
        yield from (_entry(f"{human_bytes(one.bytes)} {one.name}", one.line) for one in shown)
    else:
        table = _table(("bytes", "right"), ("array", "left"), ("shape", "left"), ("line", "left"))
        for one in shown:
            shape = f"{one.dtype}[{','.join(map(str, one.shape))}]"
            table.add_row(*map(Text, (human_bytes(one.bytes), one.name, shape, one.line)))
        yield table
    if rest:
        size = human_bytes(sum(one.bytes for one in rest))
        yield Text(f"and {count_of(len(rest), 'smaller array')}: {size}", style="dim")


def _collectives(report: Report, console: Console) -> Iterator[RenderableType]:
    if not report.collectives:
        yield _heading("No collectives: the devices do not talk")
        return
    total = sum(use.count for use in report.collectives)
    yield _heading(f"Collectives of one step: {total:,}")
    uses = by_cost(report.collectives)
    shown, rest = uses[:MAX_COLLECTIVES], uses[MAX_COLLECTIVES:]
    if console.width < NARROW:
        yield from (
            _entry(
                f"{use.kind} {along(use)}: {use.count:,} x {human_bytes(use.bytes)}, "
                f"{human_seconds(use.seconds)}",
                use.line,
            )
            for use in shown
        )
    else:
        names: tuple[Column, ...] = (("kind", "left"), ("axes", "left"), ("seconds", "right"))
        more: tuple[Column, ...] = (("count", "right"), ("bytes each", "right"), ("line", "left"))
        table = _table(*names, *more)
        for use in shown:
            indices = (human_seconds(use.seconds), f"{use.count:,}", human_bytes(use.bytes))
            table.add_row(*map(Text, (use.kind, along(use), *indices, use.line)))
        yield table
    if rest:
        seconds = human_seconds(sum(use.seconds for use in rest))
        yield Text(
            f"and {sum(use.count for use in rest):,} from {count_of(len(rest), 'more line')}: "
            f"{seconds}",
            style="dim",
        )


def _entry(text: str, line: str) -> Text:
    return Text.assemble(text, (f"\n  {line}" if line else "", "dim"))


def _table(*columns: Column) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim")
    for name, justify in columns:
        last = name == "line"
        table.add_column(
            name, justify=justify, no_wrap=not last, overflow="fold" if last else "ellipsis"
        )
    return table


def _time(report: Report, console: Console) -> RenderableType:
    time = report.time
    room = max(6, console.width - 11 - 10 - 6 - 5)
    full = max(time.serial, time.compute, time.memory, time.overlapped, 1e-12)
    rows = [("computing", time.compute, "blue"), ("memory", time.memory, "cyan")]
    rows.append(("busy", time.busy, "blue"))
    rows += [(use.axes, use.seconds, "magenta") for use in traffic(report)]
    rows += [("serial", time.serial, "bright_black"), ("overlapped", time.overlapped, "green")]
    lines = [_heading("Time of one step")]
    for label, seconds, style in rows:
        drawn = bar(0, seconds / full, room, console)
        shown = label if len(label) < 11 else f"{label[:8]}.."
        lines.append(_bar_line(shown, human_seconds(seconds), drawn, style, ""))
    lines = [_cropped(line) for line in lines]
    text = Text(
        f"{human_flops(report.flops)} and {human_bytes(report.bytes_moved)} moved; "
        f"{percent(time.utilisation, 1)} utilised, limited by {limit(report)}"
    )
    assumed = [
        Text(f"assumed: {one}", style="dim") for one in (*report.assumptions, *time.assumptions)
    ]
    return Group(*lines, text, *assumed)


def _mesh(report: Report, console: Console) -> RenderableType:
    lines: list[Text] = [_heading("Mesh, and what a step sends along its axes")]
    sent = traffic(report)
    names, mesh = list(report.mesh), mesh_of(report)
    for name, size in report.mesh.items():
        arrow = {names[-1]: "→", **({names[-2]: "↓"} if len(names) > 1 else {})}.get(name, " ")
        if console.options.ascii_only:
            arrow = {"→": ">", "↓": "v"}.get(arrow, arrow)
        along = [one for one in sent if name in one.axes.split("+")]
        text = "; ".join(
            f"{human_bytes(one.bytes)} in {human_seconds(one.seconds)} "
            f"({', '.join(one.kinds) or 'collectives'}"
            f"{'' if one.axes == name else f', with {one.axes}'})"
            for one in along
        )
        runs_on = f" ({wiring(mesh, name)})" if mesh is not None and size > 1 else ""
        lines.append(Text(f"{arrow} {name}={size}{runs_on}: {text or 'nothing'}"))
    plain = console.options.ascii_only or not names
    picture = [] if plain else _grid_lines(report, console.width)
    return Group(*lines, *picture)


def _grid_lines(report: Report, width: int) -> list[Text]:
    """The last two axes of the mesh with the numbers of the devices, coloured by host."""
    sizes = list(report.mesh.values())
    rows, columns = (1, sizes[-1]) if len(sizes) < 2 else (sizes[-2], sizes[-1])
    near, mesh = np.zeros((rows, columns), int), mesh_of(report)
    if mesh is not None:
        near = borders(mesh).reshape(-1, rows, columns)[0]
    shown_rows, shown_columns = _shown(rows), _shown(columns)

    def cell(row: int | None, column: int | None) -> Cell:
        if row is None or column is None:
            return "…", -1
        return str(row * columns + column), int(near[row, column])

    cells = [[cell(row, column) for column in shown_columns] for row in shown_rows]
    blank = [""] * len(cells)
    drawn = grid_lines(cells, blank, [""] * len(shown_columns), width)
    return [_cropped(Text.assemble(*line)) for line in drawn]


def _shown(count: int) -> Sequence[int | None]:
    return [*range(count)] if count <= _GRID else [0, 1, None, count - 1]


def _advice(report: Report) -> Iterator[RenderableType]:
    if report.advice:
        yield _heading("What would help")
        table = Table.grid(padding=(0, 1))
        for sentence in report.advice:
            table.add_row("-", Text(sentence))
        yield table


def _origin(report: Report) -> Text:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    taken = f"estimated in {human_seconds(report.seconds_taken)}"
    return Text(f"\n{taken}{' with ' if versions else ''}{versions}", style="dim")
