"""Tables of the docs are replaced by those of results, by their titles."""

from __future__ import annotations

import doctest

import pytest

from tools.harness import documents, results
from tools.harness.command import Benchmark

PAGE = "# Page\n\n| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n\n| c |\n|---|\n| 5 |\n"
NEW = "| a | b |\n|---|---|\n| 6 | 7 |"


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "DOCS", tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def markdown(found):
    return "\n\n".join(f"| {name} |\n|---|\n| {value} |" for name, value in found.items())


def test_examples():
    result = doctest.testmod(documents)
    assert result.attempted and not result.failed


def test_only_the_tables_with_the_titles_are_replaced(page):
    documents.put("page.md", f"{NEW}\n\n| c |\n|---|\n| 8 |")
    assert page.read_text() == f"# Page\n\n{NEW}\n\n| c |\n|---|\n| 8 |\n"


def test_a_line_of_titles_becomes_a_table(page):
    page.write_text("# Page\n\n| a | b |\n\nmore\n")
    documents.put("page.md", NEW)
    assert page.read_text() == f"# Page\n\n{NEW}\n\nmore\n"


@pytest.mark.parametrize(("text", "count"), [("# Page\n", 0), (PAGE * 2, 2)])
def test_titles_that_are_not_there_once_are_named(page, text, count):
    page.write_text(text)
    with pytest.raises(LookupError, match=rf"docs/page.md has {count} tables with the titles \| a"):
        documents.put("page.md", NEW)
    assert page.read_text() == text


def test_a_run_replaces_its_tables_by_all_that_is_saved(page, capsys):
    page.write_text("| x |\n\n| y |\n")
    results.save("some", {"x": 1})
    benchmark = Benchmark("some", None, quick=1, docs=("page.md", markdown))
    benchmark.parse([])
    benchmark.finish({"y": 2}, merge=True)
    assert page.read_text() == "| x |\n|---|\n| 1 |\n\n| y |\n|---|\n| 2 |\n"
    assert "page.md" in capsys.readouterr().out


def test_a_quick_run_prints_its_tables(page, capsys):
    benchmark = Benchmark("some", None, quick=1, docs=("page.md", markdown))
    benchmark.parse(["--quick"])
    benchmark.finish({"x": 3})
    assert capsys.readouterr().out == "| x |\n|---|\n| 3 |\n"
    assert page.read_text() == PAGE


def test_docs_alone_measures_nothing(page):
    page.write_text("| x |\n")
    results.save("some", {"x": 1})
    with pytest.raises(SystemExit) as ended:
        Benchmark("some", None, docs=("page.md", markdown)).parse(["--docs"])
    assert ended.value.code == 0
    assert page.read_text() == "| x |\n|---|\n| 1 |\n"
