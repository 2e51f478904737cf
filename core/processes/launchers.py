"""The launcher of this process, its rank and the number of ranks, read from the environment.

| launcher | variables | the coordinator's address comes from |
|---|---|---|
| Ray's TorchTrainer | RAY_JOB_ID, and torchrun's | MASTER_ADDR, MASTER_PORT |
| torchrun, and others like it | RANK, WORLD_SIZE, LOCAL_RANK | MASTER_ADDR, MASTER_PORT |
| Open MPI's mpirun | OMPI_COMM_WORLD_RANK, .._SIZE, .._LOCAL_RANK | JAX, or mpi4py |
| mpiexec of MPICH and Intel | PMI_RANK, PMI_SIZE, MPI_LOCALRANKID | mpi4py |
| MVAPICH | MV2_COMM_WORLD_RANK, .._SIZE, .._LOCAL_RANK | mpi4py |
| SLURM's srun | SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, .. | JAX |
| Cloud TPU, alone and under GKE | read by JAX: the metadata server, TPU_WORKER_HOSTNAMES | JAX |
| Kubernetes, an indexed Job or a JobSet | JOB_COMPLETION_INDEX | JAX, which asks the cluster |

"JAX" is its class for that cluster; JAX_COORDINATOR_ADDRESS overrides all of them, and
JAX_COORDINATOR_PORT their port. The first launcher in the table whose variables are set counts:
torchrun may run below SLURM, and mpirun starts its own steps by srun.

>>> launch_from({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"})
Launch(launcher='torchrun', rank=1, size=4, local_rank=None, address='n0:29500')
>>> launch_from({}) is None
True

Signs of other processes, if no launcher has started this one:

>>> signs_of_others({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"})
[('SLURM', ['SLURM_NTASKS=4'], 'start the script by srun: srun python train.py')]
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from isoshard.core.errors import DistributedError
from isoshard.core.runtime._jax_internals import CLUSTERS

Find = Callable[[str], Any]


@dataclasses.dataclass(frozen=True)
class Launch:
    """This process, by its environment.

    Attributes:
        launcher: the name in `LAUNCHERS`, such as "torchrun", "slurm" or "open mpi".
        rank: of this process.
        size: number of processes.
        local_rank: rank on this machine; None if there is no variable of it.
        address: "host:port" of the coordinator, if the variables have it.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None = None
    address: str | None = None


@dataclasses.dataclass(frozen=True)
class Launcher:
    """The variables of a launcher.

    Attributes:
        name: of `Processes.launcher`.
        fix: what to do if variables or the coordinator are missing.
        marks: alternatives, each of variables that are set together; none: JAX's class decides.
        rank: variable of the rank; "": JAX's class has it.
        size: likewise of the number of processes.
        local: likewise of the rank on its machine; "" if there is none.
        needs: variables that must be set.
        coordinator: variables of the coordinator's host and port, if the launcher has some.
        clusters: JAX's classes that may have the coordinator; the first one that applies does.
    """

    name: str
    fix: str
    marks: tuple[tuple[str, ...], ...] = ()
    rank: str = ""
    size: str = ""
    local: str = ""
    needs: tuple[str, ...] = ()
    coordinator: tuple[str, ...] = ()
    clusters: tuple[str, ...] = ()


_BY_HAND = (
    "Start the script with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT (and "
    "LOCAL_RANK on machines with several GPUs) in every process; without RANK and WORLD_SIZE the "
    "script runs as one process"
)
_ADDRESS = "Set JAX_COORDINATOR_ADDRESS=HOST:PORT, of rank 0's machine, in every process"
_OR_MPI4PY = f"{_ADDRESS}, or pip install mpi4py"
_MPI_VARIABLES = ("RANK", "SIZE", "LOCAL_RANK")


def _torch(name: str, *marks: tuple[str, ...]) -> Launcher:
    ranks, address = ("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("MASTER_ADDR", "MASTER_PORT")
    return Launcher(
        name, _BY_HAND, marks, *ranks, needs=(*ranks[:2], *address), coordinator=address
    )


def _mpi(name: str, rank: str, size: str, local: str, *clusters: str) -> Launcher:
    needs = (rank, size, local)
    return Launcher(name, _OR_MPI4PY, (needs,), *needs, needs, (), (*clusters, "Mpi4pyCluster"))


LAUNCHERS = (
    _torch("ray", ("RAY_JOB_ID", "RANK", "WORLD_SIZE")),
    _torch("torchrun", ("RANK",), ("WORLD_SIZE",)),
    dataclasses.replace(
        _mpi("open mpi", *(f"OMPI_COMM_WORLD_{x}" for x in _MPI_VARIABLES), "OmpiCluster"),
        marks=(("OMPI_COMM_WORLD_RANK",),),
    ),
    _mpi("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    _mpi("mvapich", *(f"MV2_COMM_WORLD_{x}" for x in _MPI_VARIABLES)),
    Launcher(
        "slurm",
        f"Start the script by srun. {_ADDRESS}, if the first machine of the step is not rank 0's",
        (("SLURM_STEP_NODELIST", "SLURM_PROCID"),),
        *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
        needs=("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_LOCALID"),
        clusters=("SlurmCluster",),
    ),
    Launcher("gke tpu", _ADDRESS, clusters=("GkeTpuCluster",)),
    Launcher("cloud tpu", _ADDRESS, clusters=("GceTpuCluster",)),
    Launcher("kubernetes", _BY_HAND, rank="JOB_COMPLETION_INDEX", clusters=("K8sCluster",)),
)
"""In the order in which they are tried."""


def jax_cluster(name: str) -> Any:
    """JAX's class of a cluster, such as "SlurmCluster", if this process runs on one."""
    cluster = CLUSTERS.get(name)
    if cluster is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of missing packages; `signs_of_others` has better advice
        return cluster if cluster.is_env_present() else None


def agent_keeps_store() -> bool:
    """Whether torchrun's agent runs the store at its address, which outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def launch_from(env: Mapping[str, str], find: Find = jax_cluster) -> Launch | None:
    """Read a launcher's variables.

    Args:
        env: the environment, `os.environ` as a rule.
        find: returns a class of JAX by its name, or None; see `jax_cluster`.

    Returns:
        The launch, or None if there are no variables of a launcher.

    Raises:
        DistributedError: variables are missing or invalid; all are listed.

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
    for launcher in LAUNCHERS:
        if any(all(name in env for name in group) for group in launcher.marks):
            return _read(launcher, env, None)
        if launcher.marks or (launcher.rank and launcher.rank not in env):
            continue
        cluster = find(launcher.clusters[0])
        if cluster is not None and (launch := _read(launcher, env, cluster)).size > 1:
            return launch
    return None


def coordinator(launch: Launch, timeout: float, find: Find = jax_cluster) -> str | None:
    """The coordinator's address of a launch.

    Args:
        launch: from `launch_from`.
        timeout: seconds that JAX may wait until the coordinator's name can be resolved.
        find: as for `launch_from`.

    Returns:
        "host:port", or None for a single process whose launcher sets none.

    Raises:
        DistributedError: neither variables nor JAX have it.
    """
    if launch.address:
        return launch.address
    if address := os.environ.get("JAX_COORDINATOR_ADDRESS"):
        return address
    launcher = next(entry for entry in LAUNCHERS if entry.name == launch.launcher)
    cluster = next(filter(None, map(find, launcher.clusters)), None)
    if cluster is not None:
        port = os.environ.get("JAX_COORDINATOR_PORT")
        return _query(launcher, cluster.get_coordinator_address, max(1, round(timeout)), port)
    if launch.size == 1:
        return None
    raise DistributedError(
        f"rank {launch.rank} of {launch.size} was started by {launch.launcher}, whose variables "
        f"have no coordinator's address. {launcher.fix}"
    )


def signs_of_others(env: Mapping[str, str]) -> list[tuple[str, list[str], str]]:
    """Signs of other processes, if no launcher has started this one.

    Returns:
        For each cluster: its name, the variables as "NAME=value", and what to do.
    """
    signs = []
    for cluster, names, advice in _SIGNS:
        values = [
            f"{name}={env[name]}" for name, is_sign in names.items() if is_sign(env.get(name, ""))
        ]
        if values:
            signs.append((cluster, values, advice))
    return signs


def _several(value: str) -> bool:
    """Whether a variable is a count above 1, or lists several."""
    return int(value) > 1 if value.isdecimal() else "," in value


_SIGNS: tuple[tuple[str, Mapping[str, Callable[[str], bool]], str], ...] = (
    (
        "SLURM",
        {"SLURM_NTASKS": _several, "SLURM_JOB_NUM_NODES": _several},
        "start the script by srun: srun python train.py",
    ),
    (
        "MPI",
        {"OMPI_COMM_WORLD_SIZE": _several, "PMI_SIZE": _several, "PMIX_RANK": bool},
        "start the script by torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in "
        "every process",
    ),
    (
        "Cloud TPU",
        {
            "TPU_WORKER_HOSTNAMES": _several,
            "TPU_PROCESS_ADDRESSES": _several,
            "MEGASCALE_NUM_SLICES": _several,
        },
        "JAX finds no TPU in this process: pip install 'jax[tpu]', and let the container see the "
        "chips",
    ),
    (
        "Kubernetes",
        {"JOB_COMPLETION_INDEX": bool},
        "pip install 'jax[k8s]' and give the pods a service account that may read pods and jobs, "
        "or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the manifest",
    ),
    (
        "Ray",
        {"RAY_JOB_ID": bool},
        "let Ray Train start the processes: a TorchTrainer, or a JaxTrainer on TPUs and GPUs",
    ),
)
"""Cluster, its variables with a test for values that mean several processes, and what to do."""


def _read(launcher: Launcher, env: Mapping[str, str], cluster: Any) -> Launch:
    errors = [f"{name} is not set" for name in launcher.needs if not env.get(name)]
    rank, size = _count(env, launcher.rank, errors), _count(env, launcher.size, errors)
    local = _count(env, launcher.local, errors)
    address = ":".join(env.get(name, "") for name in launcher.coordinator) or None
    if cluster is not None:
        rank = _query(launcher, cluster.get_process_id) if rank is None else rank
        size = _query(launcher, cluster.get_process_count)
        local = _query(launcher, cluster.get_local_process_id)
    if rank is not None and size is not None and rank >= size:
        rank_name, size_name = launcher.rank or "number", launcher.size or "count"
        errors.append(f"{rank_name}={rank} is not below {size_name}={size}")
    for name in launcher.coordinator[1:]:
        port = _count(env, name, errors)
        if port is not None and not 0 < port < 65536:
            errors.append(f"{name}={port} is no port: give 1 to 65535")
    if errors or rank is None or size is None:
        listed = "".join(f"  {error}\n" for error in errors)
        raise DistributedError(
            f"the environment of {launcher.name} is not complete:\n{listed}{launcher.fix}"
        )
    return Launch(launcher.name, rank, size, local, address)


def _query(launcher: Launcher, method: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a method of JAX's class, which reads servers and files that may fail."""
    try:
        return method(*arguments)
    except Exception as error:
        raise DistributedError(
            f"JAX's {method.__qualname__}, called as this looks like a process of {launcher.name}, "
            f"failed: {type(error).__name__}: {error}. {launcher.fix}"
        ) from error


def _count(env: Mapping[str, str], name: str, errors: list[str]) -> int | None:
    value = env.get(name) if name else None
    if not value:
        return None
    if not value.isdecimal():
        errors.append(f"{name}={value!r} is not a whole number")
        return None
    return int(value)
