"""Core over two processes with two devices each."""

import pytest

from tests.multi_process import ranks

JOB = "core"
CHECKS = ranks.checks_of(ranks.job_module(JOB))
two = ranks.launched(JOB, 2, args=["2"])


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_with_two_devices_each(two, check):
    two.assert_passed(check, 2)
