"""Ranks that are given different things are told so, all of them, within two seconds."""

import pytest

from tests.multi_process import ranks

JOB = "given"
CHECKS = ranks.checks_of(ranks.job_module(JOB))
two = ranks.launched(JOB, 2, timeout=150)
four = ranks.launched(JOB, 4, timeout=150)


@pytest.mark.parametrize("check", CHECKS)
def test_on_two(two, check):
    two.assert_passed(check, 2)


@pytest.mark.parametrize("check", CHECKS)
def test_on_four(four, check):
    four.assert_passed(check, 4)
