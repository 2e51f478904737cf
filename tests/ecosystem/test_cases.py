"""Other libraries' programs give the numbers of CPU torch on the device."""

from __future__ import annotations

import pytest

from tests.ecosystem.cases import CASES
from tests.ecosystem.table import PAGE, measured, rows


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if not case.again],
    ids=lambda case: f"{case.library}: {case.what}",
)
def test_the_numbers_are_those_of_the_cpu(case):
    found = measured(case)
    assert found.fault == "", found.fault


def test_the_page_has_a_row_for_each():
    written = rows(PAGE.read_text())
    assert [(row[0], row[2]) for row in written] == [(case.library, case.what) for case in CASES]
    assert all(row[4] == "yes" for row in written), "python -m tests.ecosystem"
