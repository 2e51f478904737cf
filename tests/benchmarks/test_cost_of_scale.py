"""What is kept of the cost of many processes, its model, and the pages that show it."""

from __future__ import annotations

import pytest

from benchmarks import cost_of_scale as bench
from benchmarks.hosts.growth import Growth, error, fitted
from benchmarks.hosts.hosts_figure import PLOTS, draw
from tools.harness.results import ROOT, saved


@pytest.fixture(scope="module")
def runs():
    return saved("cost_of_scale")


def test_the_figure_is_of_what_is_kept(runs):
    docs = ROOT / "docs"
    assert (docs / "cost_of_scale.svg").read_text() == draw(bench.growths(runs))
    assert "](cost_of_scale.svg)" in (docs / "clusters.md").read_text()
    assert {name for names in PLOTS.values() for name in names} <= set(bench.QUANTITIES)


def test_growth_beyond_n_is_seen():
    assert fitted((2, 4, 8), (4, 16, 64)).shape == "n²"
    assert fitted((2, 4, 8), (10.0, 10.1, 9.9)).shape == "constant"
    assert error(Growth("n", 1, 2), (16, 32), (33, 65)) == 0
    assert error(Growth("n", 1, 2), (16, 32), (33, 130)) == pytest.approx(0.5)
