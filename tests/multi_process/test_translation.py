"""Meshes and blocks of four real processes, beside torch's own."""

import pytest

from tests.multi_process import ranks

JOB = "translation"
four = ranks.launched(JOB, 4)


@pytest.mark.parametrize("check", ranks.checks_of(ranks.job_module(JOB)))
def test_on_four(four, check):
    four.assert_passed(check, 4)
