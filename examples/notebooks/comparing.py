"""What two runs of one notebook say, compared.

Words and whole numbers have to be equal, numbers with a point to agree to 2 per cent: another
processor adds in another order, and training enlarges it. Spaces and line breaks do not count, as
columns move with the width of numbers. Pictures have to be there; their pixels are not compared.
How long an estimate or a search took is not compared either.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nbformat import NotebookNode

TOLERANCE = 0.02
_WORD = re.compile(r"[-+]?\d+\.\d*(?:e[-+]?\d+)?|[-+]?\d+e[-+]?\d+|\w+|[^\w\s]")
_TAKEN = re.compile(r"(?<=estimated in )[\d.]+ \w+|(?<=choices in )[\d.]+ \w+")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")


def differences(kept: NotebookNode, computed: NotebookNode) -> list[str]:
    """Say where a notebook's kept results differ from computed ones.

    Args:
        kept: as it is on disk.
        computed: the same cells, just run.

    Returns:
        One line for each cell that differs.
    """
    messages = []
    for number, (old, new) in enumerate(zip(kept.cells, computed.cells, strict=True), 1):
        if old.cell_type != "code":
            continue
        before, after = list(_shown(old)), list(_shown(new))
        kinds = [kind for kind, _ in before], [kind for kind, _ in after]
        if kinds[0] != kinds[1]:
            messages.append(
                f"cell {number} keeps {_listed(kinds[0])}, computed {_listed(kinds[1])}"
            )
            continue
        for (_, was), (_, now) in zip(before, after, strict=True):
            if difference := first_difference(was, now):
                messages.append(f"cell {number}: {difference}")
    return messages


def first_difference(kept: str, computed: str) -> str | None:
    """Compare two texts.

    Args:
        kept: the one.
        computed: the other.

    Returns:
        The first difference, or None.

    Example:
        >>> first_difference("loss 0.1234 in 10 steps", "loss  0.1235 in 10 steps")
        >>> first_difference("loss 0.1234 in 10 steps", "loss 0.1234 in 11 steps")
        "kept '10', computed '11', after 'loss 0.1234 in'"
    """
    old, new = (_WORD.findall(_TAKEN.sub("", text)) for text in (kept, computed))
    for at in range(max(len(old), len(new))):
        was, now = (words[at] if at < len(words) else "(nothing)" for words in (old, new))
        if not _same(was, now):
            return f"kept {was!r}, computed {now!r}, after {' '.join(old[max(0, at - 3) : at])!r}"
    return None


def private(notebook: NotebookNode) -> list[str]:
    """Find what a notebook should not keep: folders of this machine, and addresses in memory.

    Args:
        notebook: just run.

    Returns:
        One line for each.
    """
    folders = {str(Path.cwd()), tempfile.gettempdir(), sys.prefix, str(Path.home())} - {"/"}
    messages = []
    for number, cell in enumerate(notebook.cells, 1):
        for _, text in _shown(cell):
            words = [folder for folder in sorted(folders) if folder in text]
            words += _ADDRESS.findall(text)
            messages += [f"cell {number} shows {word}, which is of this machine" for word in words]
    return messages


def _shown(cell: NotebookNode) -> Iterator[tuple[str, str]]:
    """The kinds of what a cell shows, with the text of those that are text."""
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            yield output.name, output.text
        elif output.output_type == "error":
            yield "error", output.evalue
        else:
            for kind, content in sorted(output.data.items()):
                yield kind, content if kind.startswith("text/") else ""


def _same(was: str, now: str) -> bool:
    if was == now:
        return True
    if not ("." in was or "e" in was) or not ("." in now or "e" in now):
        return False
    try:
        return math.isclose(float(was), float(now), rel_tol=TOLERANCE, abs_tol=1e-9)
    except ValueError:
        return False


def _listed(kinds: list[str]) -> str:
    return ", ".join(kinds) or "nothing"
