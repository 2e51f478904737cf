"""The sections of the site: the lists of links in docs/index.md.

Each heading with a list of links below it is a section: a page with this list, whose links are the
section's pages in their order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_SECTION = re.compile(r"^## (?P<title>.+)\n(?P<body>(?:(?!## ).*\n?)*)", re.M)
_ENTRY = re.compile(r"^- \[(?P<title>[^\]]+)\]\((?P<page>[^)\s]+)\.md\)", re.M)


def sections(index: str) -> dict[str, tuple[str, str]]:
    """Page -> title and Markdown of each section.

    Args:
        index: the page, with links that lead to pages of the site.

    Example:
        >>> sections("# x\\n\\n## How to\\n- [Plan](plans.md): it.\\n\\n## Why\\nNo list.\\n")
        {'how_to.md': ('How to', '- [Plan](plans.md): it.')}
    """
    entries = {}
    for match in _SECTION.finditer(index):
        if _ENTRY.search(match["body"]):
            page = re.sub(r"\W+", "_", match["title"].lower()).strip("_") + ".md"
            entries[page] = (match["title"], match["body"].strip())
    return entries


def section_page(title: str, body: str, more: Sequence[str] = ()) -> str:
    """The page of a section.

    Args:
        title: its heading.
        body: its list of links.
        more: further pages of it, which come first.
    """
    listed = [_document(page) for page in more]
    for entry in _ENTRY.finditer(body):
        listed.append(f"{entry['title'].replace('`', '')} </{entry['page']}>")
    return f"# {title}\n\n{body}\n\n{_toctree(listed)}"


def start_page(index: str, pages: Sequence[str]) -> str:
    """The first page of the site, with its sections beside it."""
    return f"{index.rstrip()}\n\n{_toctree([_document(page) for page in pages])}"


def _document(page: str) -> str:
    return f"/{page.removesuffix('.md')}"


def _toctree(entries: Sequence[str]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", "", *entries, "```", ""])
