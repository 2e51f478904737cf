"""The same script under every launcher that runs on this machine: the losses of the plain run.

`make test-clusters` installs what it needs; what is missing fails, and is not skipped.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import isoshard as iso
from tests.clusters import slurm
from tests.multi_process import ranks, training

STEPS = ("--steps", "8", "--every", "4", "--turn", "4")
RANKS = 4
RECIPES = ranks.ROOT / "examples" / "clusters"
RAY_PYTHON = Path(os.environ.get("CLUSTERS_PYTHON", ranks.ROOT / ".venv-clusters/bin/python"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return training.plain(tmp_path_factory.mktemp("plain"), *STEPS)


def _launched(commands, out, launcher, undisturbed, size=RANKS, **variables):
    """Run recipes, and compare: the losses, who started the ranks, and the checkpoints."""
    own = [{"PYTHON": sys.executable, **variables}] * len(commands)
    with training.started(commands, out, own) as run:
        codes = run.wait(240)
    assert codes == [0] * len(commands), run.log.read_text()[-6000:]
    training.assert_as_undisturbed(out, undisturbed)
    starts = [line for line in run.lines() if "start" in line]
    assert [(line["ranks"], line["launcher"]) for line in starts] == [(size, launcher)]
    assert iso.latest(out) == 8


def test_two_agents_of_torchrun(undisturbed, tmp_path):
    variables = {"HEAD": "127.0.0.1", "PORT": str(ranks.free_port()), "LOCAL_ADDR": "127.0.0.1"}
    command = ["sh", str(RECIPES / "torchrun.sh"), *training.options(tmp_path, *STEPS)]
    variables |= {"NODES": "2", "RANKS": "2"}
    _launched([command] * 2, tmp_path, "torchrun", undisturbed, **variables)


def test_mpirun(undisturbed, tmp_path):
    command = ["sh", str(RECIPES / "mpirun.sh"), *training.options(tmp_path, *STEPS)]
    options = "--oversubscribe" + (" --allow-run-as-root" if os.geteuid() == 0 else "")
    variables = {"RANKS": str(RANKS), "MPI_OPTIONS": options}
    _launched([command], tmp_path, "open mpi", undisturbed, **variables)


def test_sbatch_and_srun(undisturbed, tmp_path):
    with slurm.cluster(RANKS) as variables:
        command = [
            *("sbatch", "--wait", "--nodes=1", f"--ntasks-per-node={RANKS}", "--export=ALL"),
            *(f"--output={tmp_path}/slurm.log", f"--chdir={ranks.ROOT}"),
            *(str(RECIPES / "slurm.sbatch"), *training.options(tmp_path, *STEPS)),
        ]
        _launched([command], tmp_path, "slurm", undisturbed, **variables)


def test_ray_train(undisturbed, tmp_path):
    assert RAY_PYTHON.exists(), f"{RAY_PYTHON}: make test-clusters makes it"
    command = [
        *(str(RAY_PYTHON), str(RECIPES / "ray_train.py"), "--workers", str(RANKS)),
        *("--cpus", str(RANKS + 1), "--restarts", "0", "--", *training.options(tmp_path, *STEPS)),
    ]
    _launched([command], tmp_path, "torch.distributed", undisturbed)


def test_jax_alone_on_processes_of_several_devices(tmp_path):
    """As on TPUs: two processes of two devices, whose checkpoint one process of eight goes on with."""  # noqa: E501
    by_jax = ("--by", "jax", "--every", "4")
    calm, out = tmp_path / "calm", tmp_path / "out"
    devices = "--xla_force_host_platform_device_count="
    for folder, steps, count in ((calm, "8", 1), (out, "4", 2)):
        own = ranks.as_torchrun(count)
        command = training.script(folder, *by_jax, "--steps", steps, "--tp", "2")
        variables = [{**own(rank), "XLA_FLAGS": f"{devices}2"} for rank in range(count)]
        with training.started([command] * count, folder, variables) as run:
            assert run.wait(180) == [0] * count, run.log.read_text()[-6000:]
    again = training.script(out, *by_jax, "--steps", "8", "--tp", "4")
    with training.started([again], out, [{"XLA_FLAGS": f"{devices}8"}]) as run:
        assert run.wait(180) == [0], run.log.read_text()[-6000:]
    assert [line["start"] for line in training.lines(out) if "start" in line] == [0, 4]
    training.assert_as_undisturbed(out, training.steps(calm))
