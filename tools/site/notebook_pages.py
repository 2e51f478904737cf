"""Notebooks as pages, from the outputs that they keep. Nothing is run."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .repository_links import ROOT

_TO_SECTION = re.compile(r"\]\(#([^)\s]+)\)")
_NOTE = (
    "*This page is the notebook [`{path}`]({name}) with the outputs that it keeps; "
    "`make notebooks` runs it and compares.*"
)


@dataclasses.dataclass(frozen=True)
class NotebookPage:
    """A notebook as Markdown, and the pictures in it by their name beside the page."""

    markdown: str
    pictures: Mapping[str, bytes]


def page(path: Path) -> NotebookPage:
    """The page of a notebook.

    Args:
        path: of the notebook, as Jupyter writes it (format 4).
    """
    notebook = json.loads(path.read_text())
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for number, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(_TO_SECTION.sub(_by_heading, source))
        elif cell["cell_type"] == "code":
            # "force": commands of IPython are no Python, and no reason for a warning.
            parts.append(_fenced(f":force:\n\n{source}", "{code-block} python"))
            for order, output in enumerate(cell["outputs"]):
                stem = f"{path.stem}_files/{number}_{order}"
                parts += _shown(output, stem, pictures)
    parts.append(_NOTE.format(path=path.relative_to(ROOT).as_posix(), name=path.name))
    return NotebookPage("\n\n".join(parts) + "\n", pictures)


def _by_heading(match: re.Match[str]) -> str:
    """A link to a section: Jupyter names it by its text, the site as forges do."""
    kept = re.sub(r"[^\w\- ]", "", match[1].replace("-", " ")).strip().lower()
    return f"](#{kept.replace(' ', '-')})"


def _shown(output: Mapping[str, Any], stem: str, pictures: dict[str, bytes]) -> Iterator[str]:
    if output["output_type"] == "stream":
        yield _printed("".join(output["text"]))
        return
    if output["output_type"] == "error":
        yield _printed("\n".join(output["traceback"]))
        return
    data = output["data"]
    if "image/png" in data:
        pictures[f"{stem}.png"] = base64.b64decode("".join(data["image/png"]))
        yield f"![what the cell above shows]({stem}.png)"
    elif "image/svg+xml" in data:
        pictures[f"{stem}.svg"] = "".join(data["image/svg+xml"]).encode()
        yield f"![what the cell above shows]({stem}.svg)"
    elif "text/html" in data:
        yield _as_html("".join(data["text/html"]))
    else:
        yield _printed("".join(data["text/plain"]))


def _as_html(html: str) -> str:
    """HTML as Markdown leaves it alone: one line; `&#10;` breaks the lines of a `<pre>`."""
    return f'<div class="output">{html.strip().replace(chr(10), "&#10;")}</div>'


def _printed(text: str) -> str:
    return _fenced(f":class: output\n\n{text}", "{code-block} text")


def _fenced(text: str, language: str) -> str:
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 3)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
