"""A run that loses ranks, or machines, or is told to end, trains on as if nothing had been: same batches and losses.

The decoder of examples/clusters/train.py, FSDP2 over tensor parallelism, steps by torch and by JAX.
"""  # noqa: E501

from __future__ import annotations

import os
import random
import signal

import pytest

import isoshard as iso
from tests.multi_process import ranks, training

STEPS = ("--steps", "16", "--every", "4", "--turn", "4")
BACK = 60.0
"""Seconds within which a run computes again after a rank was killed."""

GRACE = 20.0


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
    text = (tmp_path / "output.log").read_text()
    assert "isoshard: rank 2 ended without reporting an error" in text


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


def test_sigterm_of_one_rank_saves_and_others_go_on_with_it(undisturbed, tmp_path):
    out = tmp_path / "run"
    with training.started(*_four(out)) as run:
        run.until(lambda lines: bool(lines) and lines[-1].get("step", 0) >= 5, 120)
        os.kill(run.started[3].pid, signal.SIGTERM)
        codes = run.wait(GRACE)
    assert codes == [iso.distributed.Termination.STATUS] * 4, run.log.read_text()[-6000:]
    *_, last, end = run.lines()
    assert (end["saved"], end["status"]) == (last["step"] + 1, 75)
    assert iso.latest(out) == end["saved"]

    own = ranks.as_torchrun(2)
    fewer = [training.script(out, *STEPS, "--tp", "1")] * 2  # mesh (2, 1) after (2, 2)
    with training.started(fewer, out, [own(rank) for rank in range(2)]) as run:
        assert run.wait(180) == [0, 0], run.log.read_text()[-6000:]
    assert [line["start"] for line in run.lines() if "start" in line] == [0, end["saved"]]
    numbers = [line["step"] for line in run.lines() if "step" in line]
    assert numbers == [*range(16)]  # no batch twice, none lost
    training.assert_as_undisturbed(out, undisturbed)


def _four(out):
    """The commands of four ranks, the folder of the run, and the variables of each rank."""
    own = ranks.as_torchrun(4)
    command = training.script(out, *STEPS, "--grace", str(GRACE))
    return [command] * 4, out, [own(rank) for rank in range(4)]
