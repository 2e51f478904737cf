"""A rank fails: every other rank ends soon, with the reason."""

from __future__ import annotations

import re

import pytest

from isoshard.core.processes.failure_monitor import ENDED
from tests.multi_process import ranks
from tests.multi_process.jobs.failures import FROZEN, PATIENCE

BUSY = 3  # times the stated seconds, where other tests use the processors too
SOON = BUSY * ENDED
AGREEMENTS = ranks.checks_of(ranks.job_module("agreement"))
BOOM = "failed: ValueError: boom"
DIED = "ended without reporting an error"


def _fault(scratch):
    return float((scratch / "fault").read_text())


def _fail(kind, size, culprit, scratch):
    """Without torchrun, which would end the others by itself."""
    args = [kind, str(culprit)]
    environment = ranks.as_torchrun(size)
    return ranks.processes("failures", size, scratch, environment, timeout=90, args=args)


@pytest.mark.parametrize(
    ("kind", "size", "culprit", "code", "told"),
    [
        ("raise", 4, 2, 1, BOOM),
        ("kill", 3, 0, -9, DIED),
        ("exit", 2, 1, 3, DIED),
    ],
)
def test_all_ranks_end(kind, size, culprit, code, told, tmp_path):
    outcome = _fail(kind, size, culprit, tmp_path)
    assert outcome.codes[culprit] == code
    for rank in range(size):
        assert outcome.ended[rank] - _fault(tmp_path) < SOON
        if rank != culprit:
            assert outcome.codes[rank] not in (0, None)
            line = f"isoshard: rank {culprit} {told}.*; rank {rank} ends too"
            assert re.search(line, outcome.outputs[rank]), outcome.outputs[rank]
    traceback = "ValueError: boom" in outcome.outputs[culprit]
    assert traceback == (kind == "raise")


def test_a_rank_that_falls_silent_is_noticed_by_its_heartbeats(tmp_path):
    outcome = _fail("stop", 2, 1, tmp_path)
    assert outcome.codes[0] not in (0, None), outcome.output
    assert outcome.ended[0] - _fault(tmp_path) < FROZEN
    assert "stopped sending heartbeats" in outcome.outputs[0]


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_leaves_early_is_named(culprit, tmp_path):
    outcome = _fail("leave", 2, culprit, tmp_path)
    assert None not in outcome.codes and 0 not in outcome.codes
    assert max(outcome.ended) - _fault(tmp_path) < BUSY * (PATIENCE + ENDED)
    told = f"rank {culprit} failed: it ended {PATIENCE} s ago.*; rank {1 - culprit} ends"
    assert re.search(told, outcome.output), outcome.output


def test_torchrun_on_two_nodes(tmp_path):
    outcome = ranks.torchrun("failures", 2, tmp_path, nodes=2, timeout=90, args=["raise", "1"])
    assert None not in outcome.codes and 0 not in outcome.codes
    assert max(outcome.ended) - _fault(tmp_path) < SOON
    assert f"isoshard: rank 1 {BOOM}; rank 0 ends too" in outcome.output


def test_sigterm_of_torchrun_ends_hanging_ranks(tmp_path):
    outcome = ranks.torchrun("failures", 2, tmp_path, timeout=90, args=["launcher", "1"])
    assert outcome.code not in (0, None)
    assert outcome.ended[0] - _fault(tmp_path) < SOON < 30  # when torchrun would send SIGKILL


four = ranks.launched("agreement", 4)


@pytest.mark.parametrize("check", AGREEMENTS)
def test_agreement_of_four(four, check):
    four.assert_passed(check, 4)


@pytest.mark.parametrize("subject", ["mesh", "shape"])
def test_an_uncaught_disagreement_ends_every_rank(subject, tmp_path):
    environment = ranks.as_torchrun(2)
    outcome = ranks.processes("disagree", 2, tmp_path, environment, timeout=60, args=[subject])
    assert outcome.codes == [1, 1], outcome.output
    for output in outcome.outputs:
        assert "DistributedError: the ranks do not agree:\n" in output
        assert "rank 1: an exchange" in output
    assert max(outcome.ended) - _fault(tmp_path) < SOON
