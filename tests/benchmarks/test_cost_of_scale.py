"""What is kept of the cost of many processes, its model, and the pages that show it."""

from __future__ import annotations

import pytest

from benchmarks import cost_of_scale as bench
from benchmarks.hosts.growth import Growth, error, fitted
from benchmarks.hosts.hosts_figure import PLOTS, draw
from tools.harness.results import ROOT, saved

GROWING = {
    "comparison: requests, all": "each rank makes its three",
    "comparison: processor, ms, busiest": "rank 0 serves the requests of all",
    "first exchange: processor, ms, busiest": "likewise",
    "save: processor, ms, busiest": "likewise",
    "restore: processor, ms, busiest": "likewise",
    "save: files, all": "each rank writes its own",
    "restore: kB of the manifest": "it lists every file",
    "open files and connections": "gloo connects each rank to each other one",
    "open files and connections, busiest": "likewise, and all call rank 0",
    "rendezvous: processor, ms": "likewise",
    "rendezvous: processor, ms, busiest": "likewise",
    "first program: processor, ms": "JAX's collectives on CPUs: likewise",
    "first program: processor, ms, busiest": "likewise, by addresses that rank 0 keeps",
}
"""What may grow as the number of processes does, and why."""


@pytest.fixture(scope="module")
def runs():
    return saved("cost_of_scale")


@pytest.mark.parametrize("name", bench.QUANTITIES)
def test_what_was_measured_grows_no_faster_than_it_must(runs, name):
    growth = bench.growth_of(runs, bench.QUANTITIES[name])
    allowed = ("constant", "log n", "n") if name in GROWING else ("constant", "log n")
    assert growth.shape in allowed, growth


COUNTS = [name for name, one in bench.QUANTITIES.items() if one.counted]


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_few_processes_foretell_those_of_many(runs, name):
    one = bench.QUANTITIES[name]
    assert bench.missed_by(runs, one) <= max(0.02, 1.5 * one.slack)


def test_a_process_alone_does_not_pay_for_the_comparison(runs):
    assert runs["alone"]["values"]["ratio"] < 1.02


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


def test_reports_are_pooled():
    phase = {"seconds": 1.0, "cpu": 0.5, "requests": 3, "bytes": 90, "storage": 0}
    process = {"rss": 1, "peak": 2, "files": 3, "threads": 4, "saved": 0, "manifest": 7}
    reports = [
        {"phases": {one: {**phase, "requests": n} for one in bench.PHASES}, **process}
        for n in (3, 3, 5)
    ]
    found = bench.summary(reports)
    assert found["save"]["requests"] == {"a rank": 3, "busiest": 5, "all": 11}
    assert found[""]["manifest"]["a rank"] == 7


def test_seconds_on_machines_are_the_busiest_ranks_and_its_requests():
    requests = {"a rank": 10}
    runs = {
        str(n): {"save": {"cpu": {"busiest": 1 + n / 8, "all": n}, "requests": requests}}
        for n in bench.SIZES
    }
    assert bench.seconds_on_hosts(runs, "save", 1024) == pytest.approx(129 + 10 * bench.ROUND_TRIP)
    assert bench.seconds_here(runs, "save", 32) == pytest.approx(16)
