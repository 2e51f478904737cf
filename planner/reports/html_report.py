"""A report as HTML: one fragment with its style and pictures inside, or a whole page.

It loads nothing and runs nothing, follows the reader's light or dark theme (a notebook's too), and
every text from a report is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from isoshard.core.runtime.formatting import (
    count_of,
    human_bytes,
    human_flops,
    human_seconds,
    percent,
)

from .html_style import STYLE
from .key_figures import along, by_cost, joined, limit, mesh_of, shares, traffic, verdict, wiring
from .mesh_picture import mesh_picture
from .svg_pictures import axis_fill, memory_bars, time_bars
from .timeline_picture import timeline_picture

if TYPE_CHECKING:
    from .report import Report

MAX_COLLECTIVES = 40
"""Rows of the table of collectives; the others are summed up in one."""

MAX_LIVE = 12
"""Arrays listed at the peak."""
MAX_NAME = 40
"""Characters of an array's name; of longer ones the middle is left out."""

NUMBERS = frozenset({"bytes", "share", "count", "bytes each", "bytes a step", "seconds", "devices"})
"""Columns of tables that are set to the right."""


def fragment(report: Report) -> str:
    """A report as a `div`.

    Args:
        report: any.

    Returns:
        HTML.
    """
    return wrapped(
        _head(report),
        _section("Memory of one device", _memory(report)),
        _section("Time of one step", _time(report)),
        _section("Timeline", _timeline(report)),
        _section("Mesh", _mesh(report)),
        _section("Collectives of one step", _collectives(report)),
        _section("What would help", _advice(report)),
        _foot(report),
    )


def page(title: str, content: str) -> str:
    """A whole page.

    Args:
        title: of the page.
        content: a fragment.

    Returns:
        HTML.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title></head>\n"
        f'<body class="isoshard-page">{content}</body></html>\n'
    )


def wrapped(*sections: str) -> str:
    """Sections in one `div` with the style.

    Args:
        sections: HTML.
    """
    return f'<div class="isoshard-report"><style>{STYLE}</style>\n{"".join(sections)}</div>'


def verdict_badge(report: Report) -> str:
    """Whether it fits, in a frame.

    Args:
        report: any.
    """
    return f'<span class="{"good" if report.fits else "bad"}">{escape(verdict(report))}</span>'


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table.

    Args:
        columns: their names; those of `NUMBERS` are set to the right.
        rows: cells, each HTML already.
    """
    kinds = [' class="number"' if name in NUMBERS else "" for name in columns]
    head = "".join(
        f"<th{kind}>{escape(name)}</th>" for name, kind in zip(columns, kinds, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, kinds, strict=True))
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _section(title: str, content: str) -> str:
    return f"<section><h3>{escape(title)}</h3>{content}</section>\n" if content else ""


def _head(report: Report) -> str:
    axes = " x ".join(f"{name}={size}" for name, size in report.mesh.items())
    facts = [
        ("machine", report.topology),
        ("mesh", axes),
        ("depth", report.depth),
        ("step", human_seconds(report.time.overlapped)),
        ("utilised", percent(report.time.utilisation, 1)),
        ("limited by", limit(report)),
    ]
    told = "".join(f"<div><dt>{name}</dt><dd>{escape(text)}</dd></div>" for name, text in facts)
    return (
        f'<h2>{escape(report.step)} <span class="dim">{escape(report.framework)}</span></h2>'
        f"{verdict_badge(report)}<dl>{told}</dl>"
        f'<p class="plan"><code>{escape(report.plan)}</code></p>\n'
    )


def _memory(report: Report) -> str:
    memory = report.memory
    roles = legend(
        [
            (f"fill-{role}", f"{role} {human_bytes(size)} ({percent(size, memory.peak)})")
            for role, size in shares(memory)
        ]
    )
    largest = ""
    if memory.largest:
        shown, rest = memory.largest[:MAX_LIVE], memory.largest[MAX_LIVE:]
        live = table(
            ["bytes", "array", "shape", "line"],
            [
                [
                    human_bytes(one.bytes),
                    _code(one.name, MAX_NAME),
                    _code(f"{one.dtype}[{','.join(map(str, one.shape))}]"),
                    _code(one.line),
                ]
                for one in shown
            ],
        )
        if rest:
            size = human_bytes(sum(one.bytes for one in rest))
            live += f'<p class="dim">and {count_of(len(rest), "smaller array")}: {size}</p>'
        where = f" at {_code(memory.peak_line)}" if memory.peak_line else ""
        largest = f"<h4>Largest arrays at the peak{where}</h4>{live}"
    return f"{memory_bars([('', report)])}{roles}{largest}"


def _time(report: Report) -> str:
    time = report.time
    sentences = [
        f"{human_flops(report.flops)} take {human_seconds(time.compute)}, moving "
        f"{human_bytes(report.bytes_moved)} takes {human_seconds(time.memory)}; operation by "
        f"operation the larger of both: {human_seconds(time.busy)}. With collectives one after the "
        f"other {human_seconds(time.serial)}, overlapping {human_seconds(time.overlapped)}."
    ]
    sentences += [f"Assumed: {one}." for one in (*report.assumptions, *time.assumptions)]
    words = "".join(f'<p class="dim">{escape(one)}</p>' for one in sentences)
    return time_bars([("", report)]) + words


def _timeline(report: Report) -> str:
    picture = timeline_picture(report)
    words = "Bytes alive on one device, and what it does; nothing overlaps. A lane is as high as "
    words += "the share of the time that it takes."
    return picture and f'{picture}<p class="dim">{words}</p>'


def _mesh(report: Report) -> str:
    rows = []
    sent, mesh = traffic(report), mesh_of(report)

    def runs_on(axes: str) -> str:
        known = mesh is not None and all(name in mesh.shape for name in axes.split("+"))
        return escape(wiring(mesh, axes)) if mesh is not None and known else ""

    talking = {one.axes for one in sent}
    for one in sent:
        size = "x".join(str(report.mesh.get(name, "?")) for name in one.axes.split("+"))
        rows.append(
            [
                _swatch(axis_fill(list(report.mesh), one.axes)) + escape(one.axes),
                size,
                human_bytes(one.bytes),
                human_seconds(one.seconds),
                escape(", ".join(one.kinds)),
                runs_on(one.axes),
            ]
        )
    for name, size in report.mesh.items():
        if name not in talking:
            swatch = _swatch(axis_fill(list(report.mesh), name))
            rows.append([swatch + escape(name), str(size), "0 B", "0 s", "", runs_on(name)])
    columns = ["axes", "devices", "bytes a step", "seconds", "collectives", "runs on"]
    return f'<div class="beside"><div>{mesh_picture(report)}</div>{table(columns, rows)}</div>'


def _collectives(report: Report) -> str:
    if not report.collectives:
        return '<p class="dim">None: the devices do not talk.</p>'
    uses, axes = by_cost(report.collectives), list(report.mesh)
    rows = [
        [
            escape(use.kind),
            _swatch(axis_fill(axes, joined(use.axes))) + escape(along(use)),
            f"{use.count:,}",
            human_bytes(use.bytes),
            human_bytes(use.bytes * use.count),
            human_seconds(use.seconds),
            escape(use.dtype),
            _code(use.line),
        ]
        for use in uses[:MAX_COLLECTIVES]
    ]
    columns = ["kind", "axes", "count", "bytes each", "bytes a step", "seconds", "dtype", "line"]
    words = ""
    if rest := uses[MAX_COLLECTIVES:]:
        words = (
            f'<p class="dim">and {sum(use.count for use in rest):,} from '
            f"{count_of(len(rest), 'more line')}: "
            f"{human_bytes(sum(use.bytes * use.count for use in rest))}, "
            f"{human_seconds(sum(use.seconds for use in rest))}</p>"
        )
    return table(columns, rows) + words


def _advice(report: Report) -> str:
    items = "".join(f"<li>{escape(one)}</li>" for one in report.advice)
    return items and f"<ul>{items}</ul>"


def _foot(report: Report) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    taken = f"estimated in {human_seconds(report.seconds_taken)}"
    return f'<p class="dim">{escape(taken + (" with " if versions else "") + versions)}</p>'


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """What colours mean.

    Args:
        entries: classes and names.
    """
    words = "".join(f"<span>{_swatch(kind)}{escape(name)}</span>" for kind, name in entries)
    return f'<p class="legend">{words}</p>'


def _code(text: str, most: int | None = None) -> str:
    if most is None or len(text) <= most:
        return f"<code>{escape(text)}</code>" if text else ""
    kept = f"{text[: most // 2 - 1]}..{text[1 - most // 2 :]}"
    return f'<code title="{escape(text)}">{escape(kept)}</code>'


def _swatch(kind: str) -> str:
    square = f'<rect width="10" height="10" class="{kind}"/>'
    return f'<svg class="swatch" viewBox="0 0 10 10">{square}</svg>'
