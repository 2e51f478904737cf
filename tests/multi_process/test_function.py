"""`iso.torch_function` on DTensors, under torchrun: 2 ranks, 4 ranks, and 4 on two nodes."""

import pytest

from tests.multi_process import ranks

JOB = "function"
CHECKS = ranks.checks_of(ranks.job_module(JOB))
two = ranks.launched(JOB, 2)
four = ranks.launched(JOB, 4)
two_nodes = ranks.launched(JOB, 4, nodes=2)


@pytest.mark.parametrize("check", CHECKS)
def test_on_two(two, check):
    two.assert_passed(check, 2)


@pytest.mark.parametrize("check", CHECKS)
def test_on_four(four, check):
    four.assert_passed(check, 4)


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_nodes(two_nodes, check):
    two_nodes.assert_passed(check, 4)
