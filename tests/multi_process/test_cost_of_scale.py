"""What 2 and 4 processes ask of rank 0 and of the storage: no rank more, as they become more."""

import json

import pytest

from benchmarks import cost_of_scale as bench
from tests.multi_process import ranks

SIZES = (2, 4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    found = {}
    for n in SIZES:
        scratch = tmp_path_factory.mktemp(f"of-{n}")
        outcome = ranks.processes("cost_of_scale", n, scratch, ranks.as_torchrun(n))
        outcome.assert_passed("check_it_is_written", n)
        reports = [json.loads(path.read_text()) for path in sorted(scratch.glob("found-*.json"))]
        found[str(n)] = bench.summary(reports)
    return found


MOST = {
    "rendezvous": 2,  # where the watch is, once
    "first exchange": 5,
    "first shard": 5,
    "steady exchange": 0,
    "steady shard": 5,
    "comparison": 5,
    "save": 20,
    "restore": 10,
}
"""Requests of the busiest rank to the coordination service."""


@pytest.mark.parametrize("phase", MOST)
@pytest.mark.parametrize("size", SIZES)
def test_requests_of_a_rank(runs, phase, size):
    assert runs[str(size)][phase]["requests"]["busiest"] <= MOST[phase]


@pytest.mark.parametrize("phase", ["save", "restore"])
def test_operations_on_the_storage(runs, phase):
    few, more = (runs[str(n)][phase]["storage"] for n in SIZES)
    assert more["busiest"] <= few["busiest"] + 4
    assert more["a rank"] <= few["a rank"]


def test_a_comparison_sends_no_more(runs):
    most = [runs[str(n)]["comparison"]["bytes"]["busiest"] for n in SIZES]
    assert max(most) < 300


def test_all_requests_grow_as_the_ranks(runs):
    every = [runs[str(n)]["comparison"]["requests"]["all"] for n in SIZES]
    assert all(count <= 3 * n + 3 for n, count in zip(SIZES, every, strict=True))
