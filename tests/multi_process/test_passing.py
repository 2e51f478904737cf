"""Ranks that wait for one which has nothing to agree on are told what it was given."""

import pytest

from tests.multi_process import ranks

JOB = "passing"
three = ranks.launched(JOB, 3, timeout=200)


@pytest.mark.parametrize("check", ranks.checks_of(ranks.job_module(JOB)))
def test_on_three(three, check):
    three.assert_passed(check, 3)
