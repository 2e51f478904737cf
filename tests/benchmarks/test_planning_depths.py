"""What the depths of `estimate` say beside the compilers: figures of docs and results."""

from __future__ import annotations

import pytest

from benchmarks import planning_depths
from benchmarks.planning_depths import CASES, HELD_OUT
from tools.harness.results import ROOT, saved

KEPT = saved("planning_depths")
PAGE = (ROOT / "docs" / "planning.md").read_text()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_depths_lie_by_the_compiler(case):
    row = KEPT[case.name]
    assert row["compile"]["as_counted"] and not row["compile"]["without_line"]
    assert row["partition"]["bytes_as_compiled"]
    assert row["partition"]["collectives"] == row["compile"]["collectives"]
    assert row["trace_over_compile"] == row["trace"]["peak"] / row["compile"]["peak"]
    assert row["partition_over_compile"] == row["partition"]["peak"] / row["compile"]["peak"]
    assert 0.85 <= row["trace_over_compile"] <= 1.15
    assert 0.95 <= row["partition_over_compile"] <= 1.05


@pytest.mark.parametrize("case", CASES[1::3], ids=lambda case: case.name)
def test_kept_peaks_are_what_depth_trace_says(case):
    found = planning_depths.measure(case, ("trace",))["trace"]
    assert found["peak"] == KEPT[case.name]["trace"]["peak"]
    kept = {name: tuple(sent) for name, sent in KEPT[case.name]["trace"]["collectives"].items()}
    assert {name: tuple(sent) for name, sent in found["collectives"].items()} == kept


@pytest.mark.parametrize("cases", [CASES, HELD_OUT], ids=["cases", "held out"])
def test_docs_have_the_kept_figures(cases):
    assert planning_depths.memory_table(KEPT, cases) in PAGE
    assert planning_depths.partition_table(KEPT, cases) in PAGE
