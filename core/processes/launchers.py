"""Who started this process, and as which of how many: read from the environment.

| launcher | variables |
|---|---|
| torchrun, or whoever speaks as it does | RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK |
| SLURM's srun | SLURM_JOB_ID, SLURM_NTASKS, SLURM_PROCID, SLURM_LOCALID, SLURM_STEP_NODELIST |
| Open MPI's mpirun | OMPI_COMM_WORLD_SIZE, .._RANK, .._LOCAL_RANK, OMPI_MCA_orte_hnp_uri |

torchrun's variables come first: torchrun may itself run below SLURM.

>>> launch_from({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"})
Launch(launcher='torchrun', rank=1, size=4, local_rank=None, address='n0:29500')
>>> launch_from({}) is None
True
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from isoshard.core.errors import DistributedError

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST")
_OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the environment says of this process.

    Attributes:
        launcher: "torchrun", "slurm" or "open mpi".
        rank: number of this process.
        size: number of processes.
        local_rank: its number on this machine, or None if that is not said.
        address: "host:port" of the launcher's meeting point, if there is one.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None = None
    address: str | None = None


def launch_from(env: Mapping[str, str]) -> Launch | None:
    """Read a launcher's variables.

    Args:
        env: the environment, `os.environ` as a rule.

    Returns:
        What they say, or None if no launcher has left any.

    Raises:
        DistributedError: some are missing or are not what they should be; all are listed.

    Example:
        >>> launch_from({"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "n0"})
        Traceback (most recent call last):
            ...
        isoshard.core.errors.DistributedError: the environment of torchrun is not complete:
          MASTER_PORT is not set
          RANK=4 is not below WORLD_SIZE=4
        Start the script with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT (and \
LOCAL_RANK on machines with several GPUs) in every process; without RANK and WORLD_SIZE the \
script runs as one process
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        return _torchrun(env)
    if "SLURM_STEP_NODELIST" in env and "SLURM_PROCID" in env:
        return _numbered(env, "slurm", _SLURM, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    if "OMPI_COMM_WORLD_RANK" in env:
        size, rank, local = _OPEN_MPI
        return _numbered(env, "open mpi", _OPEN_MPI, rank, size, local)
    return None


def _torchrun(env: Mapping[str, str]) -> Launch:
    faults = [f"{name} is not set" for name in _TORCHRUN if not env.get(name)]
    rank, size = _count(env, "RANK", faults), _count(env, "WORLD_SIZE", faults)
    local = _count(env, "LOCAL_RANK", faults)
    port = _count(env, "MASTER_PORT", faults)
    _in_range(rank, size, "RANK", "WORLD_SIZE", faults)
    if port is not None and not 0 < port < 65536:
        faults.append(f"MASTER_PORT={port} is no port: give 1 to 65535")
    if faults or rank is None or size is None:
        raise DistributedError(
            "the environment of torchrun is not complete:\n"
            + "".join(f"  {fault}\n" for fault in faults)
            + f"Start the script with torchrun, or set {', '.join(_TORCHRUN)} (and LOCAL_RANK on "
            "machines with several GPUs) in every process; without RANK and WORLD_SIZE the script "
            "runs as one process"
        )
    return Launch("torchrun", rank, size, local, f"{env['MASTER_ADDR']}:{port}")


def _numbered(
    env: Mapping[str, str], launcher: str, names: tuple[str, ...], rank: str, size: str, local: str
) -> Launch:
    faults = [f"{name} is not set" for name in names if not env.get(name)]
    number, count = _count(env, rank, faults), _count(env, size, faults)
    place = _count(env, local, faults)
    _in_range(number, count, rank, size, faults)
    if faults or number is None or count is None:
        raise DistributedError(
            f"the environment of {launcher} is not complete:\n"
            + "\n".join(f"  {fault}" for fault in faults)
        )
    return Launch(launcher, number, count, place)


def _count(env: Mapping[str, str], name: str, faults: list[str]) -> int | None:
    given = env.get(name)
    if not given:
        return None
    if not given.isdecimal():
        faults.append(f"{name}={given!r} is not a whole number")
        return None
    return int(given)


def _in_range(
    rank: int | None, size: int | None, rank_name: str, size_name: str, faults: list[str]
) -> None:
    if rank is not None and size is not None and rank >= size:
        faults.append(f"{rank_name}={rank} is not below {size_name}={size}")
