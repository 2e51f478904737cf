"""What 2 and 4 processes ask of rank 0 and of the storage: no rank more, as they become more."""

import pytest

from benchmarks import cost_of_scale as bench

SIZES = (2, 4)


@pytest.fixture(scope="module")
def runs():
    """Whoever waits long says where; here all have time, so that the counts are of what must be."""
    return {
        str(n): bench.summary(bench.launch(n, repeats=2, limit=200, patience=120.0)) for n in SIZES
    }


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
