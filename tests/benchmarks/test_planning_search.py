"""Found plans against plans by hand: what is kept, and what a run of some rows leaves of it."""

from __future__ import annotations

from benchmarks import planning_search
from tools.harness import documents, results
from tools.harness.results import ROOT, saved

KEPT = saved("planning_search")
DOCS = ROOT / "docs"


def test_no_found_plan_is_slower_by_more_than_a_twentieth_or_over_memory():
    ratios = {title: row["ratio"] for title, row in KEPT.items() if row["fits"] and row["ratio"]}
    assert len(ratios) > 40 and max(ratios.values()) <= 1.05
    assert sum(ratio < 0.9 for ratio in ratios.values()) >= 2
    assert all(row["memory"] <= row["capacity"] for row in KEPT.values() if row["fits"])
    assert all(row["hand"] is None for row in KEPT.values() if not row["fits"])
    assert "In no row do they need more than 1.05 times" in (DOCS / "planning.md").read_text()


def test_a_run_of_one_machine_keeps_the_other_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(documents, "DOCS", tmp_path)
    page = tmp_path / "benchmarks.md"
    page.write_text((DOCS / "benchmarks.md").read_text())
    results.save("planning_search", KEPT)
    monkeypatch.setattr("sys.argv", ["x", "MLP", "--on", "v5e:2x4"])
    planning_search.main()
    now = results.saved("planning_search")
    title = "MLP, v5e:2x4, trace"
    assert list(now) == list(KEPT)
    assert {name: row for name, row in now.items() if name != title} == {
        name: row for name, row in KEPT.items() if name != title
    }
    row = now[title]
    assert row["fits"] and row["ratio"] <= 1.05 and row["measured"]["date"]
    assert planning_search.markdown(now) in page.read_text()
