"""Found plans against plans by hand, as kept."""

from __future__ import annotations

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
