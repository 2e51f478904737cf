"""DTensors and global arrays share each rank's memory: 4 ranks on 2 nodes."""

import pytest

from tests.multi_process import ranks

JOB = "exchange"
CHECKS = ranks.checks_of(ranks.job_module(JOB))
four = ranks.launched(JOB, 4, nodes=2)


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_nodes_of_two(four, check):
    four.assert_passed(check, 4)
