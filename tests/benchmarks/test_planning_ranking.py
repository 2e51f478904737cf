"""The planner orders MaxText's published steps: figures of docs and results."""

from __future__ import annotations

import pytest

from benchmarks import maxtext_decoder, planning_ranking
from tests.reference import NEAR
from tools.harness.results import ROOT, saved

KEPT = saved("planning_ranking")


def test_steps_are_ordered_as_published():
    assert [row["model"] for row in KEPT["rows"]] == [
        name for name in planning_ranking.PUBLISHED for _ in planning_ranking.SLICES
    ]
    for how in planning_ranking.SUMS:
        for unit, published in (("_s", "published_s"), ("", "published")):
            pairs = ([row[name] for row in KEPT["rows"]] for name in (published, f"{how}{unit}"))
            assert planning_ranking.spearman(*pairs) >= 0.9


@pytest.mark.parametrize(("name", "slices"), [("16B", 1)])
def test_kept_rows_are_what_estimate_says(name, slices):
    rate = planning_ranking.PUBLISHED[name][planning_ranking.SLICES.index(slices)]
    row = planning_ranking.row_of(maxtext_decoder.MODELS[name], slices, rate)
    (kept,) = (one for one in KEPT["rows"] if (one["model"], one["slices"]) == (name, slices))
    assert row.pop("limit") == kept["limit"] == "compute"
    assert row.pop("fits") is kept["fits"] is True
    assert row == pytest.approx({key: kept[key] for key in row}, rel=NEAR)


def test_docs_have_the_kept_rows():
    page = (ROOT / "docs" / "planning.md").read_text()
    assert planning_ranking.markdown(KEPT) in page
    for how in planning_ranking.SUMS:
        for unit in ("seconds", "TFLOP/s"):
            assert f"{KEPT['spearman'][f'{how}, {unit}, all rows']:.2f}" in page
