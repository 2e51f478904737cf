"""Tables of the docs, which benchmarks replace by those of their results.

A table of a page is known by its first line, its titles:

>>> page = "Rows:\\n\\n| who | ms |\\n|---|---|\\n| we | 9 |\\n\\nEnd"
>>> print(replaced(page, "| who | ms |\\n|-|-|"))
Rows:
<BLANKLINE>
| who | ms |
|-|-|
<BLANKLINE>
End
"""

from __future__ import annotations

import re
from pathlib import Path

from .results import ROOT

DOCS = ROOT / "docs"


def put(page: str, tables: str) -> Path:
    """Replace tables of a page by others with the same titles.

    Args:
        page: below `docs/`.
        tables: in Markdown, an empty line between two.

    Returns:
        The page's path.

    Raises:
        LookupError: the page has no table with these titles, or several.
    """
    path = DOCS / page
    text = path.read_text()
    for table in tables.split("\n\n"):
        try:
            text = replaced(text, table)
        except LookupError as error:
            raise LookupError(f"docs/{page} {error}") from None
    path.write_text(text)
    return path


def replaced(text: str, table: str) -> str:
    """A page with another table in the place of that with the same titles.

    Args:
        text: of the page.
        table: in Markdown.

    Raises:
        LookupError: as `put` raises it.
    """
    titles = table.strip().partition("\n")[0]
    matches = list(re.finditer(rf"^{re.escape(titles)}$(?:\n\|.*)*", text, re.M))
    if len(matches) != 1:
        raise LookupError(
            f"has {len(matches)} tables with the titles {titles}: put this line once where the "
            "table is to be"
        )
    [at] = matches
    return text[: at.start()] + table.strip() + text[at.end() :]
