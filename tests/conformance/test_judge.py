"""What makes a run fail: wrong values always, others unless they are expected, strictly."""

import pytest

from tests.conformance.cells import Cell
from tests.conformance.judge import THRESHOLDS, faults, figure

GOOD = Cell("pass", 4, 4)
BROKEN = Cell("error", 3, 4, "NotImplementedError: no")
NOTHING = Cell("none", reason="no operand has an axis that divides over the devices")


def a_run(**cells):
    """A hundred good entries, and one with the given cells."""
    everything = dict.fromkeys(THRESHOLDS, GOOD)
    return {f"op{i}": everything for i in range(100)} | {"odd": everything | cells}


def test_a_good_run_has_no_faults():
    assert faults(a_run(), {}) == []
    assert faults(a_run(sharded=NOTHING), {}) == []


def test_a_failure_that_nobody_expects():
    assert faults(a_run(forward=BROKEN), {}) == ["odd, forward: error: NotImplementedError: no"]
    assert faults(a_run(forward=BROKEN), {("odd", "forward"): "sparse"}) == []


@pytest.mark.parametrize("status", ["crash", "timeout"])
def test_a_process_that_ended_is_a_failure(status):
    assert faults(a_run(forward=Cell(status, reason="gone")), {}) == [
        f"odd, forward: {status}: gone"
    ]


def test_a_wrong_value_cannot_be_expected():
    wrong = Cell("wrong", 3, 4, "1 of 2 elements differ")
    assert faults(a_run(forward=wrong), {("odd", "forward"): "known"}) == [
        "odd, forward: wrong value: 1 of 2 elements differ"
    ]


@pytest.mark.parametrize("cell", [GOOD, NOTHING])
def test_an_expected_failure_that_passes_fails_the_run(cell):
    assert "does not fail any more" in faults(a_run(forward=cell), {("odd", "forward"): "known"})[0]


def test_an_expected_failure_that_does_not_exist_fails_the_run():
    expected = {("gone", "forward"): "known"}
    assert faults(a_run(), expected) == [
        "gone, forward: in tests/conformance/expected.py, but there is no such cell"
    ]
    assert faults(a_run(), expected, whole=False) == []


def test_expected_failures_do_not_raise_the_share():
    results = {f"op{i}": {"forward": GOOD if i < 96 else BROKEN} for i in range(100)}
    expected = {(f"op{i}", "forward"): "known" for i in range(96, 100)}
    assert faults(results, expected) == [
        "forward: 96 of 100 entries pass, 96.0%; at least 99% must"
    ]


def test_figures_count_entries_and_samples():
    host = Cell("pass", 2, 2, host=True)
    got = figure("forward", a_run(forward=host) | {"other": {"forward": NOTHING}})
    assert (got.passed, got.entries, got.nothing, got.samples) == (101, 101, 1, 402)
    assert (got.wrong, got.host, got.share) == (0, 1, 1.0)
