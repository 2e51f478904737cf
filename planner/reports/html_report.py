"""A report as HTML: one fragment with its style and pictures inside, or a whole page.

It loads nothing and runs nothing, follows the reader's light or dark theme (a notebook's too), and
every text from a report is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from isoshard.core.kit import count_of, human_bytes, human_flops, human_seconds, percent

from .html_pictures import mesh_picture, timeline_picture
from .key_figures import along, by_cost, joined, limit, mesh_of, shares, traffic, verdict, wiring
from .svg_pictures import axis_fill, memory_bars, time_bars

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
    """A report as a `div`."""
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
    """A whole page."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title></head>\n"
        f'<body class="isoshard-page">{content}</body></html>\n'
    )


def wrapped(*sections: str) -> str:
    """Sections in one `div` with the style."""
    return f'<div class="isoshard-report"><style>{STYLE}</style>\n{"".join(sections)}</div>'


def verdict_badge(report: Report) -> str:
    """Whether it fits, in a frame."""
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
    join = "".join(f"<div><dt>{name}</dt><dd>{escape(text)}</dd></div>" for name, text in facts)
    return (
        f'<h2>{escape(report.step)} <span class="dim">{escape(report.framework)}</span></h2>'
        f"{verdict_badge(report)}<dl>{join}</dl>"
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
    text = "".join(f'<p class="dim">{escape(sentence)}</p>' for sentence in sentences)
    return time_bars([("", report)]) + text


def _timeline(report: Report) -> str:
    picture = timeline_picture(report)
    timeline = (
        "Bytes alive on one device, and what it does; nothing overlaps. A lane is as high as "
    )
    timeline += "the share of the time that it takes."
    return picture and f'{picture}<p class="dim">{timeline}</p>'


def _mesh(report: Report) -> str:
    rows = []
    sent, mesh = traffic(report), mesh_of(report)

    def runs_on(axes: str) -> str:
        runs_on = mesh is not None and all(name in mesh.shape for name in axes.split("+"))
        return escape(wiring(mesh, axes)) if mesh is not None and runs_on else ""

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
    collectives = ""
    if rest := uses[MAX_COLLECTIVES:]:
        collectives = (
            f'<p class="dim">and {sum(use.count for use in rest):,} from '
            f"{count_of(len(rest), 'more line')}: "
            f"{human_bytes(sum(use.bytes * use.count for use in rest))}, "
            f"{human_seconds(sum(use.seconds for use in rest))}</p>"
        )
    return table(columns, rows) + collectives


def _advice(report: Report) -> str:
    items = "".join(f"<li>{escape(advice)}</li>" for advice in report.advice)
    return items and f"<ul>{items}</ul>"


def _foot(report: Report) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    taken = f"estimated in {human_seconds(report.seconds_taken)}"
    return f'<p class="dim">{escape(taken + (" with " if versions else "") + versions)}</p>'


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """What colours mean."""
    text = "".join(f"<span>{_swatch(kind)}{escape(name)}</span>" for kind, name in entries)
    return f'<p class="legend">{text}</p>'


def _code(text: str, most: int | None = None) -> str:
    if most is None or len(text) <= most:
        return f"<code>{escape(text)}</code>" if text else ""
    code = f"{text[: most // 2 - 1]}..{text[1 - most // 2 :]}"
    return f'<code title="{escape(text)}">{escape(code)}</code>'


def _swatch(kind: str) -> str:
    square = f'<rect width="10" height="10" class="{kind}"/>'
    return f'<svg class="swatch" viewBox="0 0 10 10">{square}</svg>'


_ROOT = ".isoshard-report"

_LIGHT = {
    "ink": "#1f2328",
    "dim": "#656d76",
    "paper": "#ffffff",
    "rule": "#d8dee4",
    "cell": "#c3cad3",
    "border": "#1f2328",
    "good": "#1a7f37",
    "bad": "#cf222e",
    "parameters": "#4269d0",
    "buffers": "#5aa9a0",
    "optimizer": "#d99a0b",
    "inputs": "#3a9d4c",
    "activations": "#9a5fd6",
    "other": "#8c959f",
    "compute": "#7d8fb3",
    "axis0": "#e0633f",
    "axis1": "#1f9bb5",
    "axis2": "#c9568f",
    "axis3": "#8a7a3b",
    "axes": "#8c6d5a",
}
_DARK = _LIGHT | {
    "ink": "#e6edf3",
    "dim": "#9aa2ab",
    "paper": "#12161c",
    "rule": "#30363d",
    "cell": "#4b5563",
    "border": "#e6edf3",
    "good": "#3fb950",
    "bad": "#f85149",
    "parameters": "#5f86ec",
    "activations": "#a977e0",
    "compute": "#8496bd",
}
_FILLS = [
    *("parameters", "buffers", "optimizer", "inputs", "activations", "other"),
    *("compute", "axis0", "axis1", "axis2", "axis3", "axes"),
]


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())


_RULES = {
    "": "background:var(--paper);color:var(--ink);font:14px/1.45 system-ui,sans-serif;"
    "max-width:960px;padding:16px 20px;border-radius:8px;box-sizing:border-box;text-align:left;",
    " h2": "font-size:20px;margin:0 0 8px;font-weight:600;",
    " h3": "font-size:15px;margin:22px 0 6px;font-weight:600;border-bottom:1px solid var(--rule);"
    "padding-bottom:3px;",
    " h4": "font-size:13px;margin:8px 0 4px;font-weight:600;",
    " p": "margin:4px 0;",
    " ul": "margin:4px 0;padding-left:20px;",
    " .dim": "color:var(--dim);font-weight:400;",
    " p.dim": "font-size:12.5px;",
    " .good": "color:var(--good);font-weight:600;",
    " .bad": "color:var(--bad);font-weight:600;",
    " dl": "display:flex;flex-wrap:wrap;gap:4px 26px;margin:10px 0;",
    " dt": "color:var(--dim);font-size:12px;font-weight:400;",
    " dd": "margin:0;font-weight:600;",
    " code": "font:12px ui-monospace,SFMono-Regular,Menlo,'DejaVu Sans Mono',monospace;"
    "color:inherit;background:none;padding:0;overflow-wrap:anywhere;",
    " .plan": "max-height:9em;overflow:auto;white-space:pre-wrap;",
    " .wide": "overflow-x:auto;",
    " table": "border-collapse:collapse;font-size:13px;margin:2px 0;color:inherit;border:0;",
    " tr": "background:none;",
    " th": "text-align:left;font-weight:400;color:var(--dim);font-size:12px;",
    " th, ROOT td": "padding:3px 14px 3px 0;border:0;border-bottom:1px solid var(--rule);"
    "vertical-align:top;background:none;",
    " td": "text-align:left;white-space:nowrap;",
    " td code": "overflow-wrap:normal;",
    " td.text": "white-space:normal;",
    " .number": "text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums;",
    " .best": "font-weight:700;color:var(--good);",
    " .beside": "display:flex;flex-wrap:wrap;gap:4px 40px;align-items:flex-start;",
    " .beside > *": "min-width:0;max-width:100%;",
    " svg": "display:block;max-width:100%;height:auto;overflow:visible;",
    " svg.swatch": "display:inline-block;width:10px;height:10px;margin-right:7px;",
    " p.legend": "font-size:12.5px;",
    " .legend span": "margin-right:16px;white-space:nowrap;",
    " svg text": "font:11.5px system-ui,sans-serif;fill:var(--ink);",
    " svg text.dim": "fill:var(--dim);font-size:11px;",
    " svg text.on-fill": "fill:#fff;font-weight:600;",
    " svg text.limit-text": "fill:var(--bad);",
    " .axis": "stroke:var(--dim);stroke-width:1;",
    " .grid": "stroke:var(--rule);stroke-width:1;",
    " .limit": "stroke:var(--bad);stroke-width:2;",
    " .mark": "fill:var(--ink);",
    " .border": "stroke:var(--border);stroke-width:1.6;",
    " .cell": "fill:var(--cell);",
    " .alive": "fill:var(--activations);fill-opacity:.28;stroke:var(--activations);",
    " .peak": "fill:var(--activations);",
    **{f" .fill-{name}": f"fill:var(--{name});" for name in _FILLS},
}


def _sheet() -> str:
    rules = [f"{_ROOT}{{{_variables(_LIGHT)}}}"]
    rules += [f"{_ROOT}{what.replace('ROOT', _ROOT)}{{{how}}}" for what, how in _RULES.items()]
    dark = _variables(_DARK)
    rules.append(f"@media (prefers-color-scheme:dark){{{_ROOT}{{{dark}}}}}")
    for light in ('body[data-jp-theme-light="true"]', "body.vscode-light"):
        rules.append(f"{light} {_ROOT}{{{_variables(_LIGHT)}}}")
    for theme in ('body[data-jp-theme-light="false"]', "body.vscode-dark"):
        rules.append(f"{theme} {_ROOT}{{{dark}}}")
    rules.append(f"body.isoshard-page{{margin:0;background:{_LIGHT['paper']}}}")
    page = f"body.isoshard-page{{background:{_DARK['paper']}}}"
    rules.append(f"@media (prefers-color-scheme:dark){{{page}}}")
    rules.append(f"body.isoshard-page {_ROOT}{{margin:0 auto}}")
    return "\n".join(rules)


STYLE = _sheet()
"""CSS that touches nothing outside of a report."""
