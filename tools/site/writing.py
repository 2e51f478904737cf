"""The folder of Markdown that Sphinx reads."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import griffe

from . import navigation, notebook_pages, one_tree, reference_pages, repository_links
from .public_names import PACKAGE, public_modules
from .repository_links import DOCS, NOTEBOOKS, ROOT

_ROOT_PAGES = ("README.md", "CHANGELOG.md")
"""Files of the repository that are pages of sections."""

_REFERENCE = "reference.md"
_UNLISTED = "---\norphan: true\nnosearch: true\n---\n\n"


class DocstringError(ValueError):
    """Docstrings that griffe cannot read, or that say other arguments than there are."""


def write(folder: Path) -> None:
    """Write all pages.

    Args:
        folder: what is there is replaced.

    Raises:
        DocstringError: what is wrong with docstrings, each.
    """
    if folder.exists():
        shutil.rmtree(folder)
    texts = {path.name: (path.read_text(), DOCS) for path in (ROOT / DOCS).glob("*.md")}
    for name in _ROOT_PAGES:
        texts[repository_links.page_of(name)] = ((ROOT / name).read_text(), ".")
    pages: dict[str, str | bytes] = {
        path.name: path.read_bytes()
        for path in (ROOT / DOCS).iterdir()
        if path.suffix in (".png", ".svg")
    }
    for path in sorted((ROOT / NOTEBOOKS).glob("*.ipynb")):
        converted = notebook_pages.page(path)
        page = repository_links.page_of(path.relative_to(ROOT).as_posix())
        texts[page] = (converted.markdown, NOTEBOOKS)
        pages[f"tutorials/{path.name}"] = path.read_bytes()
        pages |= {f"tutorials/{name}": picture for name, picture in converted.pictures.items()}
    reference = _reference(folder / "sources")
    pages |= reference

    for page, (text, start) in texts.items():
        pages[page] = repository_links.led_to_pages(text, start, page)
        for path in repository_links.linked(text, start):
            if repository_links.page_of(path) not in {*texts, *pages}:
                source_pages = repository_links.source_pages(path)
                pages |= {page: _UNLISTED + text for page, text in source_pages}

    index = str(pages["index.md"])
    sections = navigation.sections(index)
    for page, (title, body) in sections.items():
        more = list(reference) if page == _REFERENCE else ()
        pages[page] = navigation.section_page(title, body, more)
    pages["index.md"] = navigation.start_page(index, list(sections))
    for page, content in pages.items():
        path = folder / "pages" / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def _reference(tree: Path) -> dict[str, str]:
    one_tree.lay_out(tree, ROOT)
    lines: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("griffe")
    logger.addHandler(listener)
    try:
        package = griffe.load(
            PACKAGE,
            search_paths=[tree],
            allow_inspection=False,
            resolve_aliases=True,
            resolve_implicit=True,
        )
        pages = dict(reference_pages.pages(public_modules(package)))
    finally:
        logger.removeHandler(listener)
    if lines:
        raise DocstringError("\n".join(lines))
    return pages
