"""Modules under FSDP2 and tensor parallelism go to JAX and come back: 4 ranks on 2 nodes."""

import pytest

from tests.multi_process import ranks

JOB = "fsdp"
CHECKS = ranks.checks_of(ranks.job_module(JOB))
four = ranks.launched(JOB, 4, nodes=2)


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_nodes_of_two(four, check):
    four.assert_passed(check, 4)
