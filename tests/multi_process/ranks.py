"""Runs jobs in several processes, as `torchrun` and plain launchers start them.

A job is a module of `tests/multi_process/jobs`: its functions `check_*`, in the order in which they
are written, are called in every rank with a `World`. All checks of a job share one launch, as most
of its time is imports. What each rank says of each check comes back as `Outcome`s.

A check that fails in one rank ends that rank; the others end by what they notice of it, or by the
time limit, which kills the whole process tree.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from tests import fresh
from tools.harness.xla_flags import quick_variables

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@dataclasses.dataclass(frozen=True)
class World:
    """What a check may know of where it runs."""

    rank: int
    size: int
    scratch: Path


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one launch gave.

    Attributes:
        code: the worst exit code, None if it had to be killed.
        codes: of each process that was started: torchruns, or ranks.
        seconds: from start to end.
        ended: when each of these ended, as `time.time()` tells it; None if it had to be killed.
        output: stdout and stderr of all.
        outputs: of each process that was started.
        reports: each rank's report of each check.
    """

    code: int | None
    codes: Sequence[int | None]
    seconds: float
    ended: Sequence[float | None]
    output: str
    outputs: Sequence[str]
    reports: Mapping[int, Mapping[str, str]]

    def assert_passed(self, check: str, ranks: int) -> None:
        """Raise AssertionError with the traceback of each rank in which a check did not pass."""
        wrong = []
        for rank in range(ranks):
            told = self.reports.get(rank, {}).get(check, "did not run")
            if told != "passed":
                wrong.append(f"rank {rank}: {told}")
        assert not wrong, "\n".join(wrong) + f"\n\noutput:\n{self.output[-4000:]}"


def checks_of(job: ModuleType) -> list[str]:
    """The names of a job's checks, in the order in which they run."""
    return [
        name
        for name, found in vars(job).items()
        if name.startswith("check_") and inspect.isfunction(found)
    ]


def torchrun(
    job: str,
    ranks: int,
    scratch: Path,
    *,
    nodes: int = 1,
    timeout: float = 180,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a job by `torchrun`.

    Args:
        job: name of a module in `jobs`.
        ranks: processes in all.
        scratch: an empty folder that all ranks may write to.
        nodes: torchruns on this machine, each with `ranks // nodes` processes.
        timeout: seconds after which all is killed; `Outcome.code` is None then.
        args: for the job, in `sys.argv`.
        env: more environment variables.
    """
    port = free_port()
    commands = [
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes={nodes}", f"--node-rank={node}", f"--nproc-per-node={ranks // nodes}"),
            *("--master-addr=127.0.0.1", f"--master-port={port}"),
            *(str(HERE / "rank.py"), job, str(scratch), *args),
        ]
        for node in range(nodes)
    ]
    return _run(commands, [{}] * nodes, scratch, timeout, env)


def launched(job: str, ranks: int, nodes: int = 1, **options: Any) -> Any:
    """A fixture: the `Outcome` of one launch of a job, for all tests of a module.

    Args:
        job: as for `processes`.
        ranks: likewise.
        nodes: machines that the ranks say to be on.
        **options: likewise.
    """
    import pytest  # not in the ranks

    @pytest.fixture(scope="module")
    def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
        scratch = tmp_path_factory.mktemp(job)
        return processes(job, ranks, scratch, as_torchrun(ranks, nodes), **options)

    return outcome


def processes(
    job: str,
    ranks: int,
    scratch: Path,
    environment: Callable[[int], Mapping[str, str]],
    *,
    timeout: float = 180,
    args: Sequence[str] = (),
    forked: bool = True,
) -> Outcome:
    """Run a job in processes started one by one, as SLURM or a shell script does.

    Args:
        job: name of a module in `jobs`.
        ranks: processes in all.
        scratch: an empty folder that all ranks may write to.
        environment: gives the environment variables of a rank.
        timeout: seconds after which all is killed; `Outcome.code` is None then.
        args: for the job, in `sys.argv`.
        forked: by `tests.fresh`, where torch and JAX are imported already.
    """
    command = [str(HERE / "rank.py"), job, str(scratch), *args]
    if not forked:
        command = [sys.executable, *command]
    return _run([command] * ranks, [environment(rank) for rank in range(ranks)], scratch, timeout)


def as_torchrun(ranks: int, nodes: int = 1) -> Callable[[int], Mapping[str, str]]:
    """For `processes`: torchrun's variables, without torchrun, which would end the others."""
    port = str(free_port())
    return lambda rank: {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % (ranks // nodes)),
        "GROUP_RANK": str(rank // (ranks // nodes)),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks // nodes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def _run(
    commands: Sequence[Sequence[str]],
    own: Sequence[Mapping[str, str]],
    scratch: Path,
    timeout: float,
    env: Mapping[str, str] | None = None,
) -> Outcome:
    base = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "XLA_"))
    }
    base |= {
        **quick_variables(version("jax")),
        "OMP_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        **(env or {}),
    }
    logs = [(scratch / f"launch-{number}.log").open("w+") for number in range(len(commands))]
    start = time.monotonic()
    started = [
        started_process(command, {**base, **mine}, log)
        for command, mine, log in zip(commands, own, logs, strict=True)
    ]
    ended: list[float | None] = [None] * len(started)
    try:
        while None in ended and time.monotonic() < start + timeout:
            time.sleep(0.02)
            for number, one in enumerate(started):
                if ended[number] is None and one.poll() is not None:
                    ended[number] = time.time()
    finally:
        seconds = time.monotonic() - start
        codes = [one.poll() for one in started]
        for one in started:
            _kill(one)
    outputs = []
    for log in logs:
        log.seek(0)
        outputs.append(log.read())
        log.close()
    reports = {
        int(path.stem.removeprefix("report-")): json.loads(path.read_text())
        for path in scratch.glob("report-*.json")
    }
    code = None if None in codes else max(codes, key=lambda one: abs(one or 0))
    return Outcome(code, codes, seconds, ended, "".join(outputs), outputs, reports)


def started_process(
    command: Sequence[str], env: Mapping[str, str], log: IO[Any]
) -> subprocess.Popen[bytes] | fresh.Process:
    """Start a process that leads a session.

    Args:
        command: its words; of a Python file alone, it is forked by `tests.fresh`.
        env: all its variables.
        log: the file for what it prints.
    """
    if command[0].endswith(".py"):
        return fresh.start(command, cwd=ROOT, env=env, output=log.name)
    return subprocess.Popen(
        command,
        env=env,
        stdout=log,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[bytes] | fresh.Process) -> None:
    """End a launcher and its ranks: torchrun gives each rank a process group of its own."""
    for pid in [*_descendants(process.pid), process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents.setdefault(parent, []).append(int(stat.parent.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def job_module(name: str) -> ModuleType:
    """A job's module, for its checks' names."""
    return importlib.import_module(f"tests.multi_process.jobs.{name}")
