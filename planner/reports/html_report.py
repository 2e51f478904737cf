"""A report as HTML: one fragment with its style and pictures inside, or a whole page.

It loads nothing and runs nothing, follows the reader's light or dark theme (a notebook's too), and
every text from a report is escaped.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape
from typing import TYPE_CHECKING

from . import key_figures, svg_pictures
from .key_figures import Table, fit_text, heading, mesh_lines, origin, time_sentences

if TYPE_CHECKING:
    from .report import Report


MAX_COLLECTIVES = 40
"""Rows of the table of collectives; the others are summed up in one."""
MAX_LIVE = 12
"""Arrays listed at the peak."""


def fragment(report: Report) -> str:
    """A report as a `div`."""
    memory, line = report.memory, report.memory.peak_line
    picture = svg_pictures.chart(
        MEMORY, key_figures.memory_rows(report), svg_pictures.BYTES, [memory.capacity]
    )
    live = table(key_figures.live_arrays(report, MAX_LIVE)) if memory.largest else ""
    times = svg_pictures.chart(TIME, key_figures.time_rows(report), svg_pictures.SECONDS)
    timeline = svg_pictures.timeline_picture(report)
    lanes = "A lane is as high as the share of the time that it takes."
    uses = key_figures.collectives(report, MAX_COLLECTIVES)
    mesh = [*mesh_lines(report), svg_pictures.mesh_caption(report)]
    advice = "".join(f"<li>{escape(text)}</li>" for text in report.advice)
    return wrapped(
        f'<h2>{escape(heading(report))}</h2><p class="{"good" if report.fits else "bad"}">'
        f'{escape(fit_text(report))}</p><p class="plan">{escape(report.plan)}</p>',
        section("Memory of one device", picture),
        section(f"Largest arrays at the peak{f' at {line}' if line else ''}", live),
        section("Time of one step", times + paragraphs(time_sentences(report))),
        section("Timeline", timeline and timeline + paragraphs([lanes])),
        section("Mesh", svg_pictures.mesh_picture(report) + paragraphs(mesh)),
        section(
            "Collectives of one step",
            table(uses) if uses.rows else paragraphs(["None: the devices do not talk."]),
        ),
        section("What would help", advice and f"<ul>{advice}</ul>"),
        paragraphs([origin(report)]),
    )


MEMORY, TIME = "memory of one device by role", "time of one step, nothing overlapping"
"""Titles of charts."""


def page(title: str, content: str) -> str:
    """A page of its own."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title></head>\n<body>{content}</body></html>\n"
    )


def wrapped(*sections: str) -> str:
    """Sections in one `div` with the style."""
    return f'<div class="isoshard-report"><style>{STYLE}</style>\n{"".join(sections)}</div>'


def section(title: str, content: str) -> str:
    """A part with a title; "" if it has no content."""
    return f"<section><h3>{escape(title)}</h3>{content}</section>\n" if content else ""


def paragraphs(texts: Sequence[str]) -> str:
    """Texts in small letters."""
    return "".join(f'<p class="dim">{escape(text)}</p>' for text in texts)


def legend(kinds: Sequence[tuple[str, str]]) -> str:
    """The colours of kinds of bars."""
    square = '<svg class="swatch" viewBox="0 0 10 10"><rect width="10" height="10" class="fill-'
    text = "".join(f'<span>{square}{kind}"/></svg>{escape(name)}</span>' for kind, name in kinds)
    return f'<p class="dim">{text}</p>'


def table(
    content: Table, right: Collection[str] = (), best: Collection[tuple[int, int]] = ()
) -> str:
    """A table.

    Args:
        content: columns and cells.
        right: columns of numbers, besides those that reports have.
        best: (row, column) of cells that are marked.
    """
    numbers = [name in NUMBERS or name in right for name in content.columns]

    def cell(tag: str, text: str, column: int, row: int = -1) -> str:
        kinds = ["number"] * numbers[column] + ["best"] * ((row, column) in best)
        kind = f' class="{" ".join(kinds)}"' if kinds else ""
        return f"<{tag}{kind}>{escape(text)}</{tag}>"

    head = "".join(cell("th", name, column) for column, name in enumerate(content.columns))
    body = "".join(
        f"<tr>{''.join(cell('td', text, column, n) for column, text in enumerate(row))}</tr>"
        for n, row in enumerate(content.rows)
    )
    rest = paragraphs([content.rest]) if content.rest else ""
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>{rest}'


NUMBERS = frozenset({"bytes", "seconds", "count", "bytes each"})
"""Columns that are aligned to the right."""

_ROOT = ".isoshard-report"
_LIGHT = (
    "--ink:#1f2328;--dim:#656d76;--paper:#fff;--rule:#d8dee4;--cell:#c3cad3;--good:#1a7f37;"
    "--bad:#cf222e;--parameters:#4269d0;--activations:#9a5fd6;--compute:#7d8fb3"
)
_DARK = (
    "--ink:#e6edf3;--dim:#9aa2ab;--paper:#12161c;--rule:#30363d;--cell:#4b5563;--good:#3fb950;"
    "--bad:#f85149;--parameters:#5f86ec;--activations:#a977e0;--compute:#8496bd"
)
_FILLS = {
    **{kind: f"var(--{kind})" for kind in ("parameters", "activations", "compute")},
    "buffers": "#5aa9a0",
    "optimizer": "#d99a0b",
    "inputs": "#3a9d4c",
    "other": "#8c959f",
    "peak": "var(--dim)",
    "axis0": "#e0633f",
    "axis1": "#1f9bb5",
    "axis2": "#c9568f",
    "axis3": "#8a7a3b",
    "axes": "#8c6d5a",
}
_RULES = """\
h2 {font-size:18px;margin:0 0 8px}
h3 {font-size:15px;margin:22px 0 6px;border-bottom:1px solid var(--rule)}
p, ROOT ul {margin:4px 0}
.dim {color:var(--dim);font-size:12.5px}
.dim span {margin-right:16px}
.good {color:var(--good);font-weight:600}
.bad {color:var(--bad);font-weight:600}
.plan {max-height:9em;overflow:auto;font-family:monospace}
.wide {overflow-x:auto}
table {border-collapse:collapse;font-size:13px;color:inherit}
th {color:var(--dim);font-weight:400}
th, ROOT td {text-align:left;padding:3px 14px 3px 0;border-bottom:1px solid var(--rule)}
.number {text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.best {font-weight:700;color:var(--good)}
svg {max-width:100%;height:auto}
svg.swatch {width:10px;height:10px;margin-right:7px}
svg text {font:11.5px system-ui,sans-serif;fill:var(--ink)}
svg text.dim {fill:var(--dim)}
.grid {stroke:var(--rule)}
.limit {stroke:var(--bad);stroke-width:2}
.border {stroke:var(--ink);stroke-width:1.6}
.cell {fill:var(--cell)}
.alive {fill:var(--activations);fill-opacity:.5}
"""


def _sheet() -> str:
    rules = [
        f"{_ROOT}{{{_LIGHT};background:var(--paper);color:var(--ink);max-width:960px;margin:0 auto;"
        "padding:16px 20px;font:14px/1.45 system-ui,sans-serif}",
        *(f"{_ROOT} {rule.replace('ROOT', _ROOT)}" for rule in _RULES.splitlines()),
        *(f"{_ROOT} .fill-{kind} {{fill:{colour}}}" for kind, colour in _FILLS.items()),
        f"@media (prefers-color-scheme:dark){{{_ROOT}{{{_DARK}}}}}",
    ]
    for theme, colours in (("light", _LIGHT), ("dark", _DARK)):
        light = "true" if theme == "light" else "false"
        rules.append(f'body[data-jp-theme-light="{light}"] {_ROOT}{{{colours}}}')
        rules.append(f"body.vscode-{theme} {_ROOT}{{{colours}}}")
    return "\n".join(rules)


STYLE = _sheet()
"""CSS that touches nothing outside of a report."""
