"""Layout pictures as HTML: boxes, the bytes that devices hold, and what gathering would send.

Nothing is loaded and nothing runs; every text is escaped; colours follow a light or dark page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from isoshard.core.runtime.formatting import human_bytes

from .box_drawing import COLORS, MAX_ROWS, shown_indices
from .device_bytes import DeviceBytes, amounts
from .layout_drawing import Boxes, LayoutDrawing, bytes_text, total

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
_STYLE = "".join(f"{_ROOT}{selector}{{{how}}}" for selector, how in _RULES.items())


def fragment_of(drawings: Sequence[LayoutDrawing]) -> str:
    """Drawings as one `div`.

    Args:
        drawings: of arrays, one or several.
    """
    every = total(drawings) if len(drawings) > 1 else None
    head = "" if every is None else f"<p><b>{escape(bytes_text(every))}</b></p>{_bars(every)}"
    body = "".join(_drawing(drawing) for drawing in drawings)
    return f'<div class="isoshard-picture"><style>{_STYLE}</style>{head}{body}</div>'


def _drawing(drawing: LayoutDrawing) -> str:
    head = "" if drawing.name is None else f"<h4>{escape(drawing.name)}</h4>"
    title = f"<p><b>{escape('  '.join(drawing.title))}</b></p>"
    notes = "".join(
        f'<p class="dim">{escape(line)}</p>' for line in (drawing.blocks, *drawing.notes)
    )
    panels = "".join(map(_table, drawing.panels))
    if drawing.left_out:
        panels += f'<p class="dim">… {drawing.left_out} more slices</p>'
    return f'{head}{title}{notes}<div class="beside"><div>{panels}</div>{_stored(drawing)}</div>'


def _stored(drawing: LayoutDrawing) -> str:
    if drawing.device_bytes is None:
        return ""
    panels = "".join(
        f'<p class="dim">gathered over {escape(axis)}: each device receives {human_bytes(size)}</p>'
        for axis, size in drawing.received
    )
    text = escape(bytes_text(drawing.device_bytes))
    return f"<div><p>{text}</p>{_bars(drawing.device_bytes)}{panels}</div>"


def _bars(stored: DeviceBytes) -> str:
    shown, left_out = amounts(stored)
    scale = 100 / stored.array_bytes if stored.array_bytes else 0
    rows = "".join(
        f"<span>{escape(devices)}</span>"
        f'<b><i style="width:{size * scale:.0f}%"></i></b>'
        f"<span>{human_bytes(size)}</span>"
        for devices, size in shown
    )
    more = f'<p class="dim">… {left_out} more amounts</p>' if left_out else ""
    return f'<div class="bar">{rows}</div>{more}'


def _table(panel: Boxes) -> str:
    columns = shown_indices(len(panel.columns), MAX_ROWS)
    head = ""
    if any(panel.columns):
        cells = ["…" if at is None else panel.columns[at] for at in columns]
        head = "<tr><th></th>" + "".join(f"<th>{escape(cell)}</th>" for cell in cells) + "</tr>"
        head = f"<thead>{head}</thead>"
    rows = []
    for row in shown_indices(len(panel.rows), MAX_ROWS):
        label = "…" if row is None else panel.rows[row]
        cells = ['<td class="gap">…</td>' if None in (row, at) else "" for at in columns]
        for index, at in enumerate(columns):
            if row is not None and at is not None:
                cells[index] = _cell(panel, row, at)
        rows.append(f"<tr><th>{escape(label)}</th>{''.join(cells)}</tr>")
    heading = f"<p>{escape(panel.heading)}</p>" if panel.heading else ""
    return f"{heading}<table>{head}<tbody>{''.join(rows)}</tbody></table>"


def _cell(panel: Boxes, row: int, column: int) -> str:
    text, colour = panel.cells[row][column]
    where = ", ".join(text for text in (panel.rows[row], panel.columns[column]) if text)
    title = f"[{where}] on {text}" if where else f"on {text}"
    fill = COLORS[colour % len(COLORS)]
    return f'<td style="background:{fill}" title="{escape(title)}">{escape(text)}</td>'
