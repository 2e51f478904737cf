"""The roofline orders MaxText's published steps: figures of docs and issue."""

from __future__ import annotations

import pytest

from benchmarks import planning_ranking


@pytest.fixture(scope="module")
def found():
    return planning_ranking.measure(planning_ranking.by_hand)


def test_steps_are_ordered_as_published(found):
    assert len(found["rows"]) == 24
    assert found["spearman"]["serial, seconds, all rows"] >= 0.95
    assert found["spearman"]["serial, seconds, 1 and 32 slices"] >= 0.95
    assert found["spearman"]["serial, TFLOP/s, all rows"] >= 0.8


def test_seconds_are_near(found):
    off = [row["serial_s"] / row["published_s"] for row in found["rows"]]
    assert 0.85 < min(off) and max(off) < 1.15


@pytest.mark.parametrize(
    ("name", "billions"), [("16B", 15.8), ("32B", 31.7), ("64B", 62.8), ("128B", 125.1)]
)
def test_models_have_the_parameters_of_their_names(name, billions):
    assert planning_ranking.MODELS[name].weights / 1e9 == pytest.approx(billions, rel=0.01)


def test_ranks_of_equal_values_are_shared():
    assert planning_ranking.spearman([1, 1, 2], [3, 3, 4]) == 1.0
    assert planning_ranking.spearman([1, 2, 3], [3, 2, 1]) == -1.0
