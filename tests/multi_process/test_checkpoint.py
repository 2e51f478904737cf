"""Checkpoints of several processes: 4 on 2 nodes that share a folder."""

import pytest

from tests.multi_process import ranks

JOB = "checkpoint"
CHECKS = ranks.checks_of(ranks.job_module(JOB))
four = ranks.launched(JOB, 4, nodes=2)


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_nodes_of_two(four, check):
    four.assert_passed(check, 4)
