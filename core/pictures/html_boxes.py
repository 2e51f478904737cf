"""Layout pictures as HTML: boxes, the bytes that devices hold, and what gathering would send.

Nothing is loaded and nothing runs; every text is escaped; colours follow a light or dark page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from isoshard.core.runtime.formatting import human_bytes

from .box_drawing import COLORS, MAX_ROWS, kept
from .device_bytes import DeviceBytes, amounts
from .layout_drawing import Boxes, LayoutDrawing, said_of, total

_ROOT = ".isoshard-picture"
_RULES = {
    "": "font:13px/1.4 system-ui,sans-serif;text-align:left;",
    " h4": "margin:10px 0 0;font:600 13px ui-monospace,Menlo,'DejaVu Sans Mono',monospace;",
    " p": "margin:2px 0;",
    " .dim": "opacity:.65;",
    " .beside": "display:flex;flex-wrap:wrap;gap:6px 36px;align-items:flex-start;",
    " table": "border-collapse:separate;border-spacing:2px;margin:4px 0;width:auto;border:0;",
    " th": "font-weight:400;opacity:.65;padding:0 6px;text-align:right;background:none;border:0;",
    " thead th": "text-align:center;",
    " td": "min-width:44px;padding:5px 8px;border:0;border-radius:3px;text-align:center;"
    "color:#1f2328;",
    " td.gap": "background:none;color:inherit;",
    " .bar": "display:grid;grid-template-columns:auto 140px auto;gap:2px 8px;align-items:center;"
    "justify-content:start;",
    " .bar b": "background:#8884;border-radius:2px;",
    " .bar i": "display:block;height:10px;border-radius:2px;background:#5f86ec;",
}
_STYLE = "".join(f"{_ROOT}{what}{{{how}}}" for what, how in _RULES.items())


def fragment_of(drawings: Sequence[LayoutDrawing]) -> str:
    """Drawings as one `div`.

    Args:
        drawings: of arrays, one or several.

    Returns:
        HTML.
    """
    whole = total(drawings) if len(drawings) > 1 else None
    head = "" if whole is None else f"<p><b>{escape(said_of(whole))}</b></p>{_bars(whole)}"
    body = "".join(_drawing(one) for one in drawings)
    return f'<div class="isoshard-picture"><style>{_STYLE}</style>{head}{body}</div>'


def _drawing(one: LayoutDrawing) -> str:
    head = "" if one.name is None else f"<h4>{escape(one.name)}</h4>"
    title = f"<p><b>{escape('  '.join(one.title))}</b></p>"
    words = "".join(f'<p class="dim">{escape(line)}</p>' for line in (one.blocks, *one.notes))
    panels = "".join(map(_table, one.panels))
    if one.left_out:
        panels += f'<p class="dim">… {one.left_out} more slices</p>'
    return f'{head}{title}{words}<div class="beside"><div>{panels}</div>{_held(one)}</div>'


def _held(one: LayoutDrawing) -> str:
    if one.held is None:
        return ""
    sent = "".join(
        f'<p class="dim">gathered over {escape(axis)}: each device receives {human_bytes(size)}</p>'
        for axis, size in one.received
    )
    return f"<div><p>{escape(said_of(one.held))}</p>{_bars(one.held)}{sent}</div>"


def _bars(held: DeviceBytes) -> str:
    shown, left_out = amounts(held)
    rows = "".join(
        f"<span>{escape(devices)}</span>"
        f'<b><i style="width:{100 * size / held.whole if held.whole else 0:.0f}%"></i></b>'
        f"<span>{human_bytes(size)}</span>"
        for devices, size in shown
    )
    more = f'<p class="dim">… {left_out} more amounts</p>' if left_out else ""
    return f'<div class="bar">{rows}</div>{more}'


def _table(panel: Boxes) -> str:
    columns = kept(len(panel.columns), MAX_ROWS)
    head = ""
    if any(panel.columns):
        cells = ["…" if at is None else panel.columns[at] for at in columns]
        head = "<tr><th></th>" + "".join(f"<th>{escape(cell)}</th>" for cell in cells) + "</tr>"
        head = f"<thead>{head}</thead>"
    rows = []
    for row in kept(len(panel.rows), MAX_ROWS):
        label = "…" if row is None else panel.rows[row]
        cells = ['<td class="gap">…</td>' if None in (row, at) else "" for at in columns]
        for place, at in enumerate(columns):
            if row is not None and at is not None:
                cells[place] = _cell(panel, row, at)
        rows.append(f"<tr><th>{escape(label)}</th>{''.join(cells)}</tr>")
    heading = f"<p>{escape(panel.heading)}</p>" if panel.heading else ""
    return f"{heading}<table>{head}<tbody>{''.join(rows)}</tbody></table>"


def _cell(panel: Boxes, row: int, column: int) -> str:
    text, colour = panel.cells[row][column]
    where = ", ".join(one for one in (panel.rows[row], panel.columns[column]) if one)
    told = f"[{where}] on {text}" if where else f"on {text}"
    fill = COLORS[colour % len(COLORS)]
    return f'<td style="background:{fill}" title="{escape(told)}">{escape(text)}</td>'
