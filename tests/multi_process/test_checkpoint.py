"""Checkpoints of several processes: 2 ranks, and 4 on 2 nodes that share a folder."""

import pytest

from tests.multi_process import ranks

JOB = "checkpoint"
CHECKS = ranks.checks_of(ranks.job_module(JOB))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return ranks.torchrun(JOB, 2, tmp_path_factory.mktemp(JOB))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return ranks.torchrun(JOB, 4, tmp_path_factory.mktemp(JOB), nodes=2)


@pytest.mark.parametrize("check", CHECKS)
def test_on_two(two, check):
    two.assert_passed(check, 2)


@pytest.mark.parametrize("check", CHECKS)
def test_on_two_nodes_of_two(four, check):
    four.assert_passed(check, 4)
