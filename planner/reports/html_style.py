"""The style of reports as HTML: all of it below one class, for light and dark."""

from __future__ import annotations

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
