"""Both programs of a step are timed and counted."""

from __future__ import annotations

import pytest

from benchmarks import rounding


@pytest.mark.parametrize("name", rounding.MODELS)
def test_both_programs_are_timed_and_counted(name):
    row = rounding.measure(name, rounding.SMALL, 2)
    for kind in rounding.PROGRAMS:
        assert row[kind]["median_ms"] > 0 and row[kind]["fusions"] > 0
    assert rounding.table({name: row}).row_count == 2
