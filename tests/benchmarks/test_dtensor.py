"""The parts of the exchange benchmark that need no four ranks."""

from __future__ import annotations

import pytest

from benchmarks import dtensor


def report(ours: float, gather: float, shared: bool) -> dict:
    def row(factor):
        return {"isoshard": [ours * factor], "gather": [gather * factor], "shared": shared}

    return {"to JAX": {"4 KB": row(1), "64 MB": row(3)}}


def test_the_ranks_times_are_pooled_and_compared():
    reports = [report(1e-4, 1e-3, True), report(2e-4, 1e-3, False), report(3e-4, 2e-3, True)]
    found = dtensor.summary(reports)["to JAX"]
    assert found["4 KB"]["isoshard"]["median_ms"] == pytest.approx(0.2)
    assert found["4 KB"]["isoshard"]["best_ms"] == pytest.approx(0.1)
    assert found["4 KB"]["gather"]["ratio"] == pytest.approx(5)
    assert (found["4 KB"]["shared"], found["4 KB"]["ranks"]) == (2, 3)
    assert found["64 MB"]["to_smallest"] == pytest.approx(3)
    shown = dtensor.table({"to JAX": found})
    assert [len(list(column.cells)) for column in shown.columns] == [2] * 8
