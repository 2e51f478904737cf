"""What the depths of `estimate` say beside the compilers: figures of docs and results."""

from __future__ import annotations

import pytest

from benchmarks import planning_depths
from benchmarks.planning_depths import CASES, HELD_OUT, Case
from isoshard.planner.machine.topologies import topology
from tools.harness.results import ROOT, saved

KEPT = saved("planning_depths")
OVER = {
    Case("U-Net", "data", "h100:2x8", (16,)): 57.62,
}
"""Steps over the limit of XLA's scheduler: peaks in GiB that jax-cuda12-plugin 0.10.2 said."""
PAGE = (ROOT / "docs" / "planning.md").read_text()


@pytest.mark.parametrize("case", CASES[1:2], ids=lambda case: case.name)
def test_kept_peaks_are_what_depth_trace_says(case):
    found = planning_depths.measure(case, ("trace",))["trace"]
    assert found["peak"] == KEPT[case.name]["trace"]["peak"]
    kept = {name: tuple(sent) for name, sent in KEPT[case.name]["trace"]["collectives"].items()}
    assert {name: tuple(sent) for name, sent in found["collectives"].items()} == kept


@pytest.mark.parametrize("case", OVER, ids=lambda case: case.name)
def test_over_the_limit_depth_trace_is_not_below_the_compiler(case):
    peak = planning_depths.measure(case, ("trace",))["trace"]["peak"] / 2**30
    ratio = peak / OVER[case]
    assert 0.97 <= ratio <= 1.05
    capacity = topology(case.machine).chip.memory / 2**30
    assert (peak <= capacity) is (OVER[case] <= capacity)
    assert f"| {case.name} | {OVER[case]:.2f} | {ratio:.3f} |" in PAGE


@pytest.mark.parametrize("cases", [CASES, HELD_OUT], ids=["cases", "held out"])
def test_docs_have_the_kept_figures(cases):
    assert planning_depths.memory_table(KEPT, cases) in PAGE
    assert planning_depths.partition_table(KEPT, cases) in PAGE
