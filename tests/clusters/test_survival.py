"""A run that loses ranks, or its machines, trains on as if nothing had been: same batches and losses.

The decoder of examples/clusters/train.py, FSDP2 over tensor parallelism, steps by torch and by JAX.
"""  # noqa: E501

from __future__ import annotations

import random

import pytest

from tests.multi_process import ranks, training

STEPS = ("--steps", "16", "--every", "4", "--turn", "4")
BACK = 60.0
"""Seconds within which a run computes again after a rank was killed."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return training.plain(tmp_path_factory.mktemp("plain"), *STEPS)


def _killed(out, size, kills, *args, timeout):
    """Train, and kill a rank whenever a step was reached: pairs of step and rank."""
    seconds = []
    with training.started(training.torchrun(out, size, *args, restarts=len(kills)), out) as run:
        for step, rank in kills:
            run.until(lambda lines, at=step: _reached(lines, at), timeout)
            starts = _starts(run.lines())
            training.kill(run.rank_pids()[rank])
            seconds.append(run.until(lambda lines, n=starts: _computes(lines, n + 1), 4 * BACK))
        assert run.wait(timeout) == [0], run.log.read_text()[-6000:]
    return seconds


def _starts(lines):
    return sum("start" in line for line in lines)


def _reached(lines, step):
    return bool(lines) and "step" in lines[-1] and lines[-1]["step"] >= step


def _computes(lines, starts):
    return _starts(lines) == starts and "step" in lines[-1]


def test_a_killed_rank_costs_a_restart_and_nothing_else(undisturbed, tmp_path):
    kills = [(11, 2)]  # its line is written, and the checkpoint of step 12 begins
    (seconds,) = _killed(tmp_path, 4, kills, *STEPS, timeout=120)
    assert seconds < BACK
    training.assert_as_undisturbed(tmp_path, undisturbed)
    starts = [line["start"] for line in training.lines(tmp_path) if "start" in line]
    assert starts[0] == 0 and starts[1] in (8, 12)
    kept = [path.name for path in tmp_path.iterdir() if path.is_dir()]
    assert sorted(kept) == ["12", "16"]  # and nothing of the save that was cut off
    assert f"isoshard: rank 2 {'ended without a word'}" in (tmp_path / "output.log").read_text()


def test_three_random_ranks_are_killed_in_30_steps(tmp_path):
    """Started anew each time by this test, which is quicker at it than torchrun."""
    args = ("--steps", "30", "--every", "5")
    undisturbed = training.plain(tmp_path / "calm", *args)
    out, size, chance = tmp_path / "killed", 4, random.Random(4)
    kills = [(step, chance.randrange(size)) for step in sorted(chance.sample(range(3, 27), 3))]
    for step, rank in [*kills, (None, None)]:
        own = ranks.as_torchrun(size)
        commands = [training.script(out, *args)] * size
        with training.started(commands, out, [own(one) for one in range(size)]) as run:
            if step is None:
                assert run.wait(120) == [0] * size, run.log.read_text()[-6000:]
            else:
                run.until(lambda lines, at=step: _reached(lines, at), 120)
                training.kill(run.started[rank].pid)
                assert 0 not in run.wait(BACK)
    training.assert_as_undisturbed(out, undisturbed)
