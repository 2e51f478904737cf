"""A rank is killed, or a job is told to go: each launcher's recipe goes on from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clusters import slurm
from tests.clusters.test_launchers import RANKS, RAY_PYTHON, RECIPES
from tests.multi_process import ranks, training

STEPS = ("--steps", "16", "--every", "4", "--turn", "4")
TIMEOUT = 240.0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return training.plain(tmp_path_factory.mktemp("plain"), *STEPS)


def _ranks_of(out, title):
    """The processes whose command is about this run, whoever has started them."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if title in command and ("ray::" in command or f"train.py --out {out} " in command):
            found.append(int(entry.name))
    return sorted(found)


def _at(step):
    return lambda lines: bool(lines) and "step" in lines[-1] and lines[-1]["step"] >= step


def _goes_on(run, undisturbed, starts=2):
    assert run.wait(TIMEOUT) == [0], run.log.read_text()[-6000:]
    training.assert_as_undisturbed(run.out, undisturbed)
    found = [line["start"] for line in run.lines() if "start" in line]
    assert len(found) == starts and found[0] == 0 and all(found[1:]), found


def _killed(run, undisturbed):
    run.until(_at(6), TIMEOUT)
    training.kill(_ranks_of(run.out, sys.executable)[-1])
    _goes_on(run, undisturbed)


def _started(command, out, **variables):
    return training.started([command], out, [{"PYTHON": sys.executable, **variables}])


def _sbatch(out, *options):
    return [
        *("sbatch", "--wait", "--nodes=1", f"--ntasks-per-node={RANKS}", "--export=ALL"),
        *(f"--output={out}/slurm.log", f"--chdir={ranks.ROOT}", *options),
        *(str(RECIPES / "slurm.sbatch"), *training.options(out, *STEPS)),
    ]


def test_mpirun(undisturbed, tmp_path):
    command = ["sh", str(RECIPES / "mpirun.sh"), *training.options(tmp_path, *STEPS)]
    options = "--oversubscribe" + (" --allow-run-as-root" if os.geteuid() == 0 else "")
    with _started(command, tmp_path, RANKS=str(RANKS), MPI_OPTIONS=options) as run:
        _killed(run, undisturbed)


def test_srun(undisturbed, tmp_path):
    with slurm.cluster(RANKS) as variables:
        with _started(_sbatch(tmp_path), tmp_path, **variables) as run:
            _killed(run, undisturbed)


def test_a_job_of_slurm_that_is_told_to_go_is_queued_again(undisturbed, tmp_path):
    with slurm.cluster(RANKS) as variables:
        with _started(_sbatch(tmp_path), tmp_path, **variables) as run:
            run.until(_at(6), TIMEOUT)
            subprocess.run(
                ["scancel", "--signal=TERM", "--name=isoshard"],
                env={**os.environ, **variables},
                timeout=30,
                check=True,
            )
            _goes_on(run, undisturbed)
    saved = [line for line in run.lines() if "saved" in line]
    assert [line["status"] for line in saved] == [75]
    numbers = [line["step"] for line in run.lines() if "step" in line]
    assert numbers == [*range(16)]  # it saved where it was: no step twice


def test_ray_train(undisturbed, tmp_path):
    command = [
        *(str(RAY_PYTHON), str(RECIPES / "ray_train.py"), "--workers", str(RANKS)),
        *("--cpus", str(RANKS + 1), "--restarts", "1", "--", *training.options(tmp_path, *STEPS)),
    ]
    with _started(command, tmp_path) as run:
        run.until(_at(6), TIMEOUT)
        workers = set(_ranks_of(tmp_path, "TrainWorker"))
        os.kill(max(workers & set(ranks._descendants(run.started[0].pid))), signal.SIGKILL)
        _goes_on(run, undisturbed)
