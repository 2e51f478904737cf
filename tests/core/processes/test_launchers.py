"""What the environment says of a process."""

import pytest

from isoshard.core.errors import DistributedError
from isoshard.core.processes.launchers import Launch, launch_from

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "n0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "n[0-1]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}


def test_torchrun():
    assert launch_from(TORCHRUN) == Launch("torchrun", 3, 4, 1, "n0:29500")


def test_slurm():
    assert launch_from(SLURM) == Launch("slurm", 2, 4, 0)


def test_open_mpi():
    assert launch_from(OPEN_MPI) == Launch("open mpi", 2, 4, 1)


def test_torchrun_below_slurm_is_torchrun():
    assert launch_from({**SLURM, **TORCHRUN}) == launch_from(TORCHRUN)


def test_slurm_without_a_step_is_nobody():
    assert launch_from({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}) is None


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(missing):
    env = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(DistributedError, match=f"\n  {missing} is not set\nStart .* torchrun"):
        launch_from(env)


@pytest.mark.parametrize("missing", ["SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_LOCALID"])
def test_a_missing_variable_of_slurm_is_named(missing):
    env = {name: value for name, value in SLURM.items() if name != missing}
    with pytest.raises(DistributedError, match=f"environment of slurm.*\n  {missing} is not set"):
        launch_from(env)


def test_all_faults_are_listed():
    env = {"RANK": "-1", "WORLD_SIZE": "many", "MASTER_ADDR": "", "MASTER_PORT": "70000"}
    with pytest.raises(DistributedError) as caught:
        launch_from(env)
    told = str(caught.value)
    assert "MASTER_ADDR is not set" in told
    assert "RANK='-1' is not a whole number" in told
    assert "WORLD_SIZE='many' is not a whole number" in told
    assert "MASTER_PORT=70000 is no port: give 1 to 65535" in told


def test_a_rank_beyond_the_size():
    with pytest.raises(DistributedError, match="RANK=4 is not below WORLD_SIZE=4"):
        launch_from({**TORCHRUN, "RANK": "4"})
