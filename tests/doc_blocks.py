"""The Python blocks of a page as one program, whose lines have the numbers that they have there.

A block `text` behind one of Python is what that one prints, or a part of it; "..." stands for what
differs from run to run.
"""

from __future__ import annotations

import dataclasses
import doctest
import re
from pathlib import Path

from tests.reference import OF_THIS_JAX

_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+?) -->\n+)?(?P<fence>```+)python\n(?P<code>.*?)^(?P=fence)$",
    re.M | re.S,
)
FIGURE = re.compile(r"\d+(\.\d+)?")
_LINES = r"(?:(?!```).*\n)*"
_PRINTED = re.compile(rf"^```python\n{_LINES}```\n\n```text\n(?P<text>{_LINES})```$", re.M)


@dataclasses.dataclass(frozen=True)
class Block:
    """A block.

    Attributes:
        code: its lines.
        line: of the page, where the code starts; the first is 1.
        reason: why it is not run; "" for one that is.
    """

    code: str
    line: int
    reason: str


def blocks(text: str) -> list[Block]:
    """The Python blocks of a page, in their order.

    >>> [found] = blocks("# A\\n\\n<!-- not run: wants a TPU -->\\n```python\\nrun()\\n```\\n")
    >>> found
    Block(code='run()\\n', line=5, reason='wants a TPU')
    """
    return [
        Block(match["code"], text[: match.start("code")].count("\n") + 1, match["reason"] or "")
        for match in _BLOCK.finditer(text)
    ]


def program(text: str) -> str:
    """All blocks of a page that are run, one after the other.

    >>> program("# A\\n```python\\nx = 1\\n```\\ntext\\n```python\\nx\\n```\\n")
    '\\n\\nx = 1\\n\\n\\n\\nx\\n'
    """
    written = ""
    for block in blocks(text):
        if not block.reason:
            written += "\n" * (block.line - 1 - written.count("\n")) + block.code
    return written


def printed(text: str) -> str:
    """What a page says that its program prints, with "..." for what it leaves out.

    >>> printed("```python\\nprint(1 / 3)\\n```\\n\\n```text\\n0.33...\\n```\\n\\nother\\n")
    '...0.33...\\n...'
    """
    return "".join(["...", *(f"{match['text']}..." for match in _PRINTED.finditer(text))])


def is_printed(text: str, output: str) -> bool:
    """Whether a page's program printed what the page says, in that order.

    With another JAX than the page's, figures may differ.

    Args:
        text: of the page.
        output: of its program.
    """
    check = doctest.OutputChecker().check_output
    if check(printed(text), output, doctest.ELLIPSIS):
        return True
    return not OF_THIS_JAX and check(
        FIGURE.sub("#", printed(text)), FIGURE.sub("#", output), doctest.ELLIPSIS
    )


def pages(root: Path) -> list[Path]:
    """README, and the pages of docs/ that have Python blocks."""
    found = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return [path for path in found if blocks(path.read_text())]
