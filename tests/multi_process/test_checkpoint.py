"""Checkpoints of several processes: 2 ranks, and 4 on 2 nodes that share a folder."""

import pytest

from tests.multi_process import ranks

JOB = "checkpoint"
CHECKS = ranks.checks_of(ranks.job_module(JOB))
two = ranks.launched(JOB, 2)
four = ranks.launched(JOB, 4, nodes=2)


@pytest.mark.parametrize("check", CHECKS)
def test_on_two(two, check):
    two.assert_passed(check, 2)


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_nodes_of_two(four, check):
    four.assert_passed(check, 4)
