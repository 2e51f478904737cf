"""The docs hold the tables of the results that are kept."""

from __future__ import annotations

import importlib
import re

import pytest

from tools.harness.results import ROOT, saved

DOCS = re.compile(r'Benchmark\(\s*"(\w+)".*?docs=\("([\w.]+)", markdown\)', re.S)
DOCUMENTED = {
    path.stem: match.groups()
    for path in sorted((ROOT / "benchmarks").glob("*.py"))
    if (match := DOCS.search(path.read_text()))
}
"""Module -> the name of its results, and the page."""


@pytest.mark.parametrize("module", DOCUMENTED)
def test_docs_hold_what_is_kept(module):
    name, page = DOCUMENTED[module]
    text = (ROOT / "docs" / page).read_text()
    written = importlib.import_module(f"benchmarks.{module}").markdown(saved(name))
    missing = [table for table in written.split("\n\n") if f"\n{table}\n\n" not in text]
    assert not missing, f"python -m benchmarks.{module} --docs writes them"


def test_the_benchmarks_with_tables_are_found():
    assert {"planned_steps", "planning_ranking", "planning_search"} <= set(DOCUMENTED)
    assert DOCUMENTED["planning_search"] == ("planning_search", "benchmarks.md")
