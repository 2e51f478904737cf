"""Each page's Python blocks run, in their order, as one program that a reader could paste."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import fresh
from tests.doc_blocks import blocks, is_printed, pages, printed, program
from tests.reference import OF_THIS_JAX

ROOT = Path(__file__).resolve().parents[1]
PAGES = {path.relative_to(ROOT).as_posix(): path for path in pages(ROOT)}
MOST_NOT_RUN = 3
"""Of all blocks: those that want more than one process."""


def run(text: str, folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Run a page's program in a new process, which has no accelerator and one device at first."""
    path = folder / f"page_{Path(name).stem}.py"
    path.write_text(program(text))
    return fresh.run(path, cwd=folder, env={"JAX_PLATFORMS": "cpu"}, timeout=300)


@pytest.mark.parametrize("name", PAGES)
def test_the_blocks_of_a_page_run(name, tmp_path):
    text = PAGES[name].read_text()
    done = run(text, tmp_path, name)
    assert done.returncode == 0, done.stderr[-3000:]
    assert is_printed(text, done.stdout), f"{printed(text)}\nis not what is printed:\n{done.stdout}"


def test_few_blocks_are_not_run():
    reasons = [block.reason for path in PAGES.values() for block in blocks(path.read_text())]
    assert len(list(filter(None, reasons))) <= MOST_NOT_RUN


def test_a_block_that_fails_is_told_with_its_line(tmp_path):
    done = run("# A\n\n```python\nx = 1\n```\n\nmore\n\n```python\nx + y\n```\n", tmp_path, "a.md")
    assert done.returncode == 1
    assert "line 10, in <module>\n    x + y" in done.stderr
    assert "NameError: name 'y'" in done.stderr


def test_what_a_page_says_that_it_prints_is_compared():
    page = "```python\nprint(1)\nprint('b')\n```\n\n```text\nb\n```\n"
    assert is_printed(page, "1\nb\n")
    assert not is_printed(page, "1\nc\n")
    figure = "```python\nprint(2)\n```\n\n```text\n2\n```\n"
    assert is_printed(figure, "2\n") and is_printed(figure, "3\n") is not OF_THIS_JAX
    assert is_printed("```python\n1\n```\n\nother\n\n```text\n5\n```\n", "")
