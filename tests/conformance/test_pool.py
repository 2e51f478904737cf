"""A worker that crashes or hangs costs its own cell, is named, and never stops the run."""

import pytest

from tests.conformance import stand_ins
from tests.conformance.cells import Cell
from tests.conformance.pool import Task, run_all


def run(*tasks, **options):
    return run_all([Task(name, columns) for name, columns in tasks], stand_ins.start, **options)


def test_every_task_is_answered_once():
    seen = []
    got = run(
        ("sin", ("a", "b")),
        ("cos", ("a",)),
        ("tan", ("b",)),
        jobs=2,
        limit=60,
        report=lambda entry, cells: seen.append(entry),
    )
    assert got["sin"] == {"a": Cell("pass", 3, 3, "sin"), "b": Cell("pass", 3, 3, "sin")}
    assert sorted(got) == sorted(seen) == ["cos", "sin", "tan"]


def test_a_crash_is_told_of_the_column_that_crashed():
    got = run(("sin", ("a", "crashes", "b")), ("cos", ("a",)), jobs=1, limit=60)
    assert got["sin"]["crashes"].status == "crash"
    assert "process ended (-6)" in got["sin"]["crashes"].reason
    assert [got["sin"]["a"].status, got["sin"]["b"].status] == ["pass", "pass"]
    assert got["cos"]["a"].status == "pass"


def test_a_hang_is_ended():
    got = run(("sin", ("hangs",)), ("cos", ("a",)), jobs=1, limit=10)
    assert got["sin"]["hangs"] == Cell("timeout", reason="not done after 10 s")
    assert got["cos"]["a"].status == "pass"


def test_options_reach_the_worker():
    got = run(("sin", ("a",)), jobs=1, limit=60, options={"passes": "error"})
    assert got["sin"]["a"].status == "error"


def test_a_worker_that_cannot_start_fails_the_run():
    with pytest.raises(RuntimeError, match="a worker could not start"):
        run_all([Task("sin", ("a",))], stand_ins.cannot_start, jobs=1, limit=60)
