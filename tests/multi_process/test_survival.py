"""A run that is told to end saves, and others go on with it: same batches and losses.

The decoder of examples/clusters/train.py, FSDP2 over tensor parallelism, steps by torch and by JAX.
Ranks that are killed: tests/clusters/test_survival.py.
"""

from __future__ import annotations

import os
import signal

import isoshard as iso
from tests.multi_process import ranks, training

STEPS = ("--steps", "16", "--every", "4", "--turn", "4")
GRACE = 20.0


def test_sigterm_of_one_rank_saves_and_others_go_on_with_it(tmp_path):
    undisturbed = training.plain(tmp_path / "plain", *STEPS)
    out = tmp_path / "run"
    with training.started(*_four(out)) as run:
        run.until(lambda lines: bool(lines) and lines[-1].get("step", 0) >= 5, 120)
        os.kill(run.started[3].pid, signal.SIGTERM)
        codes = run.wait(GRACE)
    assert codes == [iso.Termination.STATUS] * 4, run.log.read_text()[-6000:]
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
