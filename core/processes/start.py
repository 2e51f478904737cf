"""Starting a run of many processes: JAX's distributed runtime together with torch's.

Started by `torchrun --nproc-per-node 4 train.py`, or by `srun` or `mpirun`, a script begins with

    import isoshard as iso

    processes = iso.distributed.init_distributed()   # before any array is created
    print(processes.rank, "of", processes.size)

From then on `jax.devices()` lists the devices of all processes, `torch.distributed` has its default
process group, process r of the one is rank r of the other, and a rank that fails ends the others:
see `isoshard.core.processes.failure_monitor`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import resource
import socket
import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax

from isoshard.core.errors import ClusterWarning, DistributedError
from isoshard.core.frameworks import Framework, require

from . import coordination
from .failure_monitor import FailureMonitor, connect
from .handshake import env_report, handshake_by_port, handshake_by_service
from .launchers import (
    LAUNCHERS,
    Launch,
    agent_keeps_store,
    coordinator,
    launch_from,
    signs_of_others,
)

_BY_SCRIPT = ("jax.distributed", "torch.distributed")  # what runs already
_RANK_0, _OTHER_RANK = 6, 3  # connections for each other rank
_OWN_FILES = 512  # of the script itself, its data and libraries


@dataclasses.dataclass(frozen=True)
class Processes:
    """This process's rank in the run.

    Attributes:
        rank: of this process, in JAX and in torch.
        size: number of processes.
        local_rank: its rank on this machine; 0 if no variable has it.
        launcher: a name of `isoshard.core.processes.launchers.LAUNCHERS`, such as "torchrun" or
            "slurm"; "jax.distributed" or "torch.distributed" if the script itself had started that
            one; None: this process runs alone.

    Example:
        >>> Processes(rank=1, size=4, local_rank=1, launcher="torchrun").size
        4
    """

    rank: int
    size: int
    local_rank: int
    launcher: str | None


_started: Processes | None = None


def init_distributed(
    *,
    timeout: float = 120.0,
    heartbeat: float = 20.0,
    patience: float = 300.0,
    local_devices: int | None = 1,
    watch_failures: bool = True,
    preemption: bool = False,
) -> Processes:
    """Start JAX's distributed runtime and torch's process group, with the same ranks in both.

    How the processes find each other is read from the environment: torchrun's variables (where
    they are set by others too), or those of SLURM, MPI, Cloud TPU and Kubernetes, of which JAX
    finds the coordinator. If the script itself has called `jax.distributed.initialize` or
    `torch.distributed.init_process_group`, that runtime is used, and the other one started. With
    none of these this is a run of one process: torch gets a group of size 1, JAX is not changed; if
    there may be other processes, a `ClusterWarning` has advice. Without torch only JAX is started.
    A second call does nothing.

    First the processes report to rank 0, in one exchange: a port that is taken, a rank too many or
    too few, and different versions of isoshard, JAX or torch are errors in all of them.

    On CPUs both communicate by gloo. On GPUs torch gets gloo for CPU and NCCL for CUDA tensors, and
    a process has the one GPU that LOCAL_RANK names, in both frameworks.

    A rank that fails ends the others: all know the reason within 2 s and have ended within 5 s, by
    an uncaught exception, a signal or `os._exit`, while they compute or hang in a collective. A
    machine that stops responding is noticed after `heartbeat` seconds, and JAX ends the others. A
    rank that ends, also by `sys.exit`, waits for the others to end; after `patience` seconds all
    end with an error that names it.

    Args:
        timeout: seconds within which all processes must connect.
        heartbeat: seconds without a heartbeat after which a process counts as dead; at least 1. Not
            for a runtime that the script has started itself.
        patience: seconds that a rank which has ended waits for the others to end. Not for a runtime
            that the script has started itself.
        local_devices: devices of each process. DTensor needs 1. On CPUs that many virtual devices
            are created; None: all that there are.
        watch_failures: False opens no port for the failure monitor: a failing rank is noticed by
            its missing heartbeats only.
        preemption: True keeps JAX's preemption service. It catches SIGTERM, so a launcher that
            ends the ranks waits for its own limit (torchrun: 30 s) and kills them.

    Returns:
        This process's rank, and the number of ranks.

    Raises:
        DistributedError: the environment is incomplete, JAX's devices have started already, a
            process has another number of devices or other versions, the coordinator cannot be
            reached, or not all processes connected in time.

    Example:
        >>> init_distributed()                             # no launcher: a run of one process
        Processes(rank=0, size=1, local_rank=0, launcher=None)
        >>> import torch.distributed as dist
        >>> dist.get_world_size()
        1
        >>> dist.destroy_process_group()
    """
    global _started
    if _started is not None:
        return _started
    torch, launch = _torch(), _launch()
    address = _coordinator_address(launch, timeout)
    if launch is None or address is None:
        return _alone(launch, torch, timeout)
    raise_file_limit(launch.rank, launch.size)
    shaken = launch.size == 1
    if launch.launcher != "jax.distributed":
        _prepare(local_devices, preemption)
        if launch.launcher != "torch.distributed" and launch.size > 1 and not agent_keeps_store():
            handshake_by_port(env_report(launch), address, timeout)
            shaken = True
        if launch.address and torch is not None and torch.processes_joined() is None:
            torch.start_processes(launch.rank, launch.size, timeout=timeout, device=_gpu(launch))
        _start_jax(launch, address, torch, timeout, heartbeat, patience, local_devices)
    if not shaken:
        handshake_by_service(env_report(launch), timeout)
    host = _host(coordination.address())
    if launch.size > 1 and watch_failures:
        _monitor(launch, torch, host, timeout, patience)
    if torch is not None and torch.processes_joined() is None:
        post = _post("torch", timeout)
        rank, size, gpu = launch.rank, launch.size, _gpu(launch)
        torch.start_processes(rank, size, timeout=timeout, post=post, host=host, device=gpu)
    _check(launch, torch, local_devices)
    _started = Processes(launch.rank, launch.size, launch.local_rank or 0, launch.launcher)
    return _started


def raise_file_limit(rank: int, size: int) -> int:
    """Raise this process's limit of open files if the run needs more connections.

    The usual limit is 1,024 open files for a process. Rank 0 has about five connections to each
    other rank (JAX's service and collectives, torch's store and gloo, the monitor), each other rank
    two; `python -m benchmarks.cost_of_scale` counts them. Beyond some 200 ranks they exceed the
    limit, and runtimes fail with unrelated messages.

    Returns:
        The limit now; -1 if there is none. A `ClusterWarning` is issued if it is still too low.

    Example:
        >>> raise_file_limit(0, 2) == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        True
    """
    needed = _OWN_FILES + (_OTHER_RANK if rank else _RANK_0) * size
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return limit
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < needed:
        warnings.warn(
            f"rank {rank} of {size} may open {limit} files, and its connections need some "
            f"{needed}: raise the machine's limit (ulimit -Hn, LimitNOFILE= of systemd, or "
            "/etc/security/limits.conf)",
            ClusterWarning,
            stacklevel=3,
        )
    return limit


def _launch() -> Launch | None:
    """The launch of this process: from a runtime that has started already, or a launcher."""
    if coordination.is_started():
        return Launch("jax.distributed", *coordination.rank_and_size(), _local_rank())
    torch = _torch()
    joined = torch.processes_joined() if torch is not None else None
    if joined is not None and joined[1] > 1:
        host = os.environ.get("MASTER_ADDR")
        return Launch("torch.distributed", *joined, _local_rank(), _address(host, 0))
    return launch_from(os.environ)


def _coordinator_address(launch: Launch | None, timeout: float) -> str | None:
    """The coordinator's address; None: this process runs alone."""
    if launch is None or launch.launcher in _BY_SCRIPT:
        return None if launch is None else launch.address or ""
    return coordinator(launch, timeout)


def _alone(launch: Launch | None, torch: Framework | None, timeout: float) -> Processes:
    global _started
    for cluster, signs, advice in signs_of_others(os.environ) if launch is None else ():
        warnings.warn(
            f"this process runs alone, and {', '.join(signs)} looks like {cluster} with others: "
            f"{advice}. If it is meant to run alone: "
            "warnings.simplefilter('ignore', isoshard.errors.ClusterWarning)",
            ClusterWarning,
            stacklevel=3,
        )
    if torch is not None and torch.processes_joined() is None:
        torch.start_processes(0, 1, timeout=timeout)
    _started = Processes(0, 1, 0, launch.launcher if launch else None)
    return _started


def _torch() -> Framework | None:
    return require("torch") if importlib.util.find_spec("torch") is not None else None


def _local_rank() -> int | None:
    names = (launcher.local for launcher in LAUNCHERS)
    return next((int(os.environ[name]) for name in names if name in os.environ), None)


def _gpu(launch: Launch) -> int | None:
    """The index of this process's GPU among those visible, which may be only its own."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return 0 if visible and "," not in visible else launch.local_rank


def _prepare(local_devices: int | None, preemption: bool) -> None:
    """Configure JAX before its devices start."""
    if coordination.backend_runs():
        raise DistributedError(
            "JAX has started its devices already, and this process can no longer join the "
            "others; call iso.distributed.init_distributed() before the first array is created and "
            "before jax.devices() is called"
        )
    if local_devices is not None and local_devices != 1:
        jax.config.update("jax_num_cpu_devices", local_devices)
    coordination.keep_preemption(preemption)


def _start_jax(
    launch: Launch,
    address: str,
    torch: Framework | None,
    timeout: float,
    heartbeat: float,
    patience: float,
    local_devices: int | None,
) -> None:
    if torch is not None and (launch.address or launch.launcher in _BY_SCRIPT):
        own_address = _address(_host(address), _free_port()) if launch.rank == 0 else None
        address = torch.broadcast_message(own_address)
    arguments: dict[str, Any] = {
        "coordinator_address": address,
        "num_processes": launch.size,
        "process_id": launch.rank,
        "cluster_detection_method": "deactivate",
    }
    gpu = _gpu(launch)
    if local_devices == 1 and gpu is not None:
        arguments["local_device_ids"] = [gpu]
    arguments["initialization_timeout"] = round(timeout) + 60  # isoshard's own error comes first
    arguments["heartbeat_timeout_seconds"] = max(1, round(heartbeat))
    arguments["shutdown_timeout_seconds"] = round(patience) + 10  # as above
    error = _in_time(lambda: jax.distributed.initialize(**arguments), timeout)
    if error is not None:
        raise DistributedError(
            f"rank {launch.rank} of {launch.size} could not join JAX's coordination service: "
            f"{error}. Do all {launch.size} processes run (started by {launch.launcher}), and can "
            "rank 0's machine be reached from the others?"
        )


def _in_time(action: Callable[[], None], timeout: float) -> str | None:
    """Run `action`, and return its error. JAX would abort the process at its own timeout."""
    errors: list[str] = []

    def run() -> None:
        try:
            action()
        except (RuntimeError, ValueError) as error:
            errors.append(str(error).splitlines()[0])

    thread = threading.Thread(target=run, name="isoshard-start", daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        return f"not all connected within {timeout:g} s"
    return errors[0] if errors else None


def _post(key: str, timeout: float) -> Callable[[str | None], str]:
    """A function that broadcasts a text of rank 0, through JAX's coordination service."""

    def post(text: str | None) -> str:
        if text is not None:
            coordination.put(key, text)
            return text
        text = coordination.get(key, timeout)
        if text is None:
            raise DistributedError(f"rank 0 did not send its address ({key}) within {timeout:g} s")
        return text

    return post


def _monitor(
    launch: Launch, torch: Framework | None, host: str, timeout: float, patience: float
) -> None:
    def leave() -> None:
        jax.distributed.shutdown()  # waits until all have ended
        if torch is not None:
            torch.end_processes()

    connections = connect(launch.rank, launch.size, host, _post("watch", timeout), timeout)
    FailureMonitor(launch.rank, launch.size, connections, leave, patience)


def _check(launch: Launch, torch: Framework | None, local_devices: int | None) -> None:
    """Compare devices and ranks with the arguments; this starts the devices."""
    devices = jax.local_devices()
    if local_devices is not None and len(devices) != local_devices:
        raise DistributedError(
            f"rank {launch.rank} has {len(devices)} {devices[0].platform} devices, not "
            f"{local_devices}; " + _fix(devices[0].platform, len(devices))
        )
    joined = torch.processes_joined() if torch is not None else None
    if joined is not None and joined != (launch.rank, launch.size):
        raise DistributedError(
            f"this process is rank {launch.rank} of {launch.size} in JAX, but rank {joined[0]} of "
            f"{joined[1]} in torch; start both with the same ranks"
        )


def _fix(platform: str, count: int) -> str:
    if platform == "tpu":
        return f"a process drives all chips of its machine: give local_devices={count}, or None"
    if platform != "cpu":
        return f"show it one by CUDA_VISIBLE_DEVICES, or give local_devices={count}"
    return (
        "DTensor's ranks have one each. Take --xla_force_host_platform_device_count out of "
        "XLA_FLAGS and do not set jax_num_cpu_devices (or JAX_NUM_CPU_DEVICES); for several "
        f"devices in each process, without DTensor, give local_devices={count}"
    )


def _host(address: str | None) -> str:
    """The host of "host:port"; without an address, that of this machine."""
    if address:
        return address.rpartition(":")[0].strip("[]")
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def _address(host: str | None, port: int) -> str | None:
    if not host:
        return None
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
