"""`iso.torch_function` on DTensors, as under torchrun: 4 ranks on two nodes."""

import pytest

from tests.multi_process import ranks

JOB = "function"
CHECKS = ranks.checks_of(ranks.job_module(JOB))
two_nodes = ranks.launched(JOB, 4, nodes=2)


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_nodes(two_nodes, check):
    two_nodes.assert_passed(check, 4)
