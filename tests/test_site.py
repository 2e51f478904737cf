"""The documentation site, built as `make docs` builds it: every name, and no broken link."""

from __future__ import annotations

import collections
import doctest
import fcntl
import importlib
import inspect
import subprocess
import sys
import urllib.parse
from html.parser import HTMLParser
from pathlib import Path

import pytest

import isoshard
from tools.site.public_names import BRIDGES

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTED = [
    *(f"tools.site.{name}" for name in ("docstrings", "name_links", "navigation")),
    *("tools.site.reference_pages", "tools.site.repository_links", "tests.doc_blocks"),
]
FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src"}


class Html(HTMLParser):
    """What a page links to, fetches, and can be linked to at."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.fetched: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids |= {given[key] for key in ("id", "name") if given.get(key)}
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        if given.get(FETCHED.get(tag, "")) and given.get("rel") not in ("search", "index"):
            self.fetched.add(given[FETCHED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory, worker_id) -> Path:
    """The site, built once for all processes of a run."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared if worker_id == "master" else shared.parent
    out = shared / "docs" / "site"
    out.parent.mkdir(exist_ok=True)
    with (shared / "docs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            build(out)
    return out


def build(out: Path) -> None:
    """Without a search for garbage, of which there is little: a third less time."""
    program = "import gc, sys; gc.disable(); from tools.site.__main__ import main; "
    program += f"sys.exit(main(['--out', {str(out)!r}]))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Html]:
    return {path: Html(path) for path in site.rglob("*.html") if "_static" not in path.parts}


def public_names() -> set[str]:
    """What the facade exports, and what its modules and the bridges do."""
    names = {f"isoshard.{name}" for name in isoshard.__all__}
    for name in (*isoshard.__all__, *BRIDGES):
        if inspect.ismodule(found := getattr(isoshard, name)):
            names |= {f"isoshard.{name}.{inner}" for inner in found.__all__}
    return names


@pytest.mark.parametrize("module", DOCUMENTED)
def test_examples(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.failed == 0 and result.attempted


def test_every_public_name_is_there(pages):
    names = public_names()
    assert len(names) > 200
    ids = set().union(
        *(page.ids for path, page in pages.items() if path.parent.name == "reference")
    )
    assert {name for name in names if not {name, f"module-{name}"} & ids} == set()


def test_every_public_function_and_class_has_an_example():
    """tests/test_doctests.py runs them."""
    missing = set()
    for path in public_names():
        found = isoshard
        for part in path.split(".")[1:]:
            found = getattr(found, part)
        ours = callable(found) and found.__module__.startswith("isoshard")
        if ours and ">>> " not in (inspect.getdoc(found) or ""):
            missing.add(path)
    assert missing == set()


def test_every_public_member_of_a_class_is_there(pages):
    ids = set().union(*(page.ids for page in pages.values()))
    for name in ("Plan", "sharding.Tiles", "UnevenArray", "onnx.Graph", "planner.Report"):
        found = isoshard
        for part in name.split("."):
            found = getattr(found, part)
        ours = {
            f"isoshard.{name}.{member}"
            for base in found.__mro__
            if base.__module__.startswith("isoshard.")
            for member, value in vars(base).items()
            if not member.startswith("_") and inspect.getdoc(value) and callable(value)
        }
        assert ours and ours <= ids, name


def test_no_link_is_broken(site, pages):
    broken = collections.defaultdict(set)
    for path, page in pages.items():
        for link in page.links | page.fetched:
            to = urllib.parse.urlsplit(link)
            if to.scheme or to.netloc:
                continue
            target = (path.parent / urllib.parse.unquote(to.path)).resolve() if to.path else path
            if not target.is_file():
                broken[path.relative_to(site)].add(link)
            elif to.fragment and target in pages:
                if urllib.parse.unquote(to.fragment) not in pages[target].ids:
                    broken[path.relative_to(site)].add(link)
    assert dict(broken) == {}


def test_a_page_fetches_nothing_from_elsewhere(pages):
    fetched = {address for page in pages.values() for address in page.fetched}
    assert {address for address in fetched if "//" in address} == set()
    assert any(address.endswith(".js") or ".js?" in address for address in fetched)


def test_notebooks_show_what_they_keep(site):
    text = (site / "tutorials" / "first_steps_in_jax.html").read_text()
    assert "what the cell above shows" in text
    kept = {path.name for path in (site / "_images").glob("*_*.png")}
    assert len(kept) > 30


BROKEN = """# A page

[a](nowhere.md) [a](index.md#no-such-heading) ![a](nowhere.png) {nonsense}`a`
"""


def test_what_is_broken_is_refused(tmp_path):
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "index.md").write_text(BROKEN)
    (tmp_path / "pages" / "forgotten.md").write_text("# In no list\n")
    program = "import sys; from pathlib import Path; from tools.site.__main__ import html; "
    program += f"sys.exit(html(Path({str(tmp_path)!r}), Path({str(tmp_path / 'site')!r})))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1
    for said in ("nowhere.md", "no-such-heading", "nowhere.png", "nonsense", "forgotten.md"):
        assert said in done.stderr


def test_a_docstring_that_names_no_argument_is_refused(tmp_path, monkeypatch, capsys):
    entry = importlib.import_module("tools.site.__main__")
    writing = importlib.import_module("tools.site.writing")

    def lay_out(target, root):
        (target / "isoshard").mkdir(parents=True)
        (target / "isoshard" / "__init__.py").write_text(
            '__all__ = ["f"]\ndef f(x):\n    """Do.\n\n    Args:\n        y: is none.\n    """\n'
        )

    monkeypatch.setattr(writing.one_tree, "lay_out", lay_out)
    assert entry.main(["--out", str(tmp_path / "site")]) == 1
    assert "'y' does not appear in the function signature" in capsys.readouterr().err
