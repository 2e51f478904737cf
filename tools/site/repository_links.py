"""Links of pages to files of the repository: each leads to a page of the site.

A page in docs/ links to the repository as it lies on disk, which is what a forge shows. On the site
notebooks and the changelog are pages, and every other file that is linked to has a page with its
text below `source/`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs"
NOTEBOOKS = "examples/notebooks"
_PAGES = {"README.md": "readme.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")
_LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".yml": "yaml"}


def page_of(path: str) -> str:
    """The page that stands for a file or folder of the repository.

    >>> page_of("docs/plans.md"), page_of("examples/notebooks/onnx.ipynb"), page_of("LICENSE")
    ('plans.md', 'tutorials/onnx.md', 'source/LICENSE.md')
    >>> page_of("benchmarks/results")
    'source/benchmarks/results/index.md'
    """
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/")
    if path.startswith(f"{NOTEBOOKS}/") and path.endswith(".ipynb"):
        return f"tutorials/{Path(path).stem}.md"
    if (ROOT / path).is_dir():
        return f"source/{path}/index.md"
    return _PAGES.get(path, f"source/{path}.md")


def led_to_pages(text: str, folder: str, page: str) -> str:
    """Markdown with each link to an existing file of the repository leading to its page.

    Args:
        text: Markdown, whose links start from `folder`.
        folder: of the repository.
        page: where on the site the text stands.
    """

    def instead(path: str, anchor: str) -> str:
        target = page_of(path)
        return posixpath.relpath(target, posixpath.dirname(page) or ".") + anchor

    return _replaced(text, folder, instead)


def linked(text: str, folder: str) -> Iterator[str]:
    """The existing files and folders of the repository that Markdown links to."""
    results: list[str] = []

    def note(path: str, anchor: str) -> str:
        results.append(path)
        return path + anchor

    _replaced(text, folder, note)
    yield from results


def source_pages(path: str) -> Iterator[tuple[str, str]]:
    """Page and Markdown of a file; of a folder also those of its files."""
    if not (ROOT / path).is_dir():
        yield page_of(path), _of_file(path)
        return
    names = sorted(entry.name for entry in (ROOT / path).iterdir() if entry.is_file())
    rows = "\n".join(f"- [`{name}`]({name}.md)" for name in names)
    yield page_of(path), f"# {path}\n\n{rows}\n"
    for name in names:
        yield page_of(f"{path}/{name}"), _of_file(f"{path}/{name}")


def _of_file(path: str) -> str:
    text = (ROOT / path).read_text()
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 3)
    language = _LANGUAGES.get(Path(path).suffix, "text")
    return f"# {path}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def _replaced(text: str, folder: str, instead: Callable[[str, str], str]) -> str:
    def link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match["path"]))
        if path.startswith("..") or not (ROOT / path).exists():
            return match[0]
        return instead(path, match["anchor"] or "")

    return _LINK.sub(link, text)
