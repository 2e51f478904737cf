"""The benchmark of neighbours, on a small scale and without four processes."""

from __future__ import annotations

import pytest

from benchmarks import domain_knn, knn_contestants

NAMES = ("isoshard", "isoshard with gradients", "torch")


@pytest.fixture
def small(monkeypatch):
    """What the contestants of one process find here, where there are eight devices already."""
    monkeypatch.setattr("isoshard.simulate_devices", lambda count: None)
    points, queries = knn_contestants.clouds(203, 30)
    return {name: knn_contestants.CONTESTANTS[name](points, queries, 4, rounds=2) for name in NAMES}


def test_the_contestants_find_the_same(small):
    assert all(len(found["seconds"]) == 2 for found in small.values())
    assert all(found["peak"] >= found["before"] > 1e7 for found in small.values())
    turns = {name: [[found], [found]] for name, found in small.items()}
    results = domain_knn.summary(turns)
    assert results["isoshard"]["ratio"] == 1 and results["torch"]["processes"] == 1
    shown = domain_knn.table(results, (203, 30, 4))
    assert [len(list(column.cells)) for column in shown.columns] == [3] * 8


def test_memory_is_summed_over_processes_and_other_findings_are_refused():
    one = {"seconds": [0.1, 0.3], "first_s": 1.0, "before": 2**20, "peak": 3 * 2**20}
    one["sums"] = [10.0, 20.0]
    results = domain_knn.summary({"isoshard": [[one]], "DTensor": [[one] * 4]})
    assert results["DTensor"]["peak_mib"] == 12 and results["DTensor"]["added_mib"] == 8
    assert results["isoshard"]["median_ms"] == pytest.approx(200)
    other = one | {"sums": [10.0, 21.0]}
    with pytest.raises(RuntimeError, match=r"DTensor found sums of \[10.0, 21.0\], isoshard"):
        domain_knn.summary({"isoshard": [[one]], "DTensor": [[one, other]]})
