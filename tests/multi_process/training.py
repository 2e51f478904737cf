"""Runs examples/clusters/train.py under any launcher, watches its lines, and ends all its processes."""  # noqa: E501

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests import fresh
from tests.multi_process import ranks
from tools.harness.xla_flags import quick_variables

SCRIPT = ranks.ROOT / "examples" / "clusters" / "train.py"
NEAR = 1e-5
"""How far a loss may be from that of the undisturbed run."""


def environment(**more: str) -> dict[str, str]:
    """This process's, for one device each, and the clone's own isoshard."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = os.pathsep.join(filter(None, [str(ranks.ROOT), os.environ.get("PYTHONPATH", "")]))
    fixed = {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    fixed |= quick_variables(version("jax"))
    return {**kept, "TF_CPP_MIN_LOG_LEVEL": "1", **fixed, **more}


@dataclasses.dataclass
class Training:
    """A run that has been started.

    Attributes:
        started: the launcher, or each rank's process.
        out: the folder of the run.
        log: of all output.
    """

    started: Sequence[subprocess.Popen[bytes] | fresh.Process]
    out: Path
    log: Path

    def lines(self) -> list[dict[str, Any]]:
        """What rank 0 has written, of every start."""
        return lines(self.out)

    def until(self, true: Callable[[list[dict[str, Any]]], bool], timeout: float) -> float:
        """Wait for lines.

        Args:
            true: of the lines.
            timeout: seconds to wait.

        Returns:
            The seconds that it took, without those in which this process was stopped as well.
        """
        seconds, last = 0.0, time.monotonic()
        while not true(self.lines()):
            over = all(one.poll() is not None for one in self.started)
            assert not over and seconds < timeout, self.log.read_text()[-6000:]
            time.sleep(0.02)
            last, before = time.monotonic(), last
            seconds += min(last - before, 1.0)
        return seconds

    def wait(self, timeout: float) -> list[int]:
        """The exit codes of what was started, after its end.

        Args:
            timeout: seconds to wait, without those in which this process was stopped as well.
        """
        seconds, last = 0.0, time.monotonic()
        while any(one.poll() is None for one in self.started):
            assert seconds < timeout, f"hangs: {self.log.read_text()[-6000:]}"
            time.sleep(0.02)
            last, before = time.monotonic(), last
            seconds += min(last - before, 1.0)
        return [int(one.returncode) for one in self.started]

    def rank_pids(self) -> dict[int, int]:
        """The process of each rank, by the variables that the launcher gave it."""
        found = {}
        for one in self.started:
            for pid in [one.pid, *ranks._descendants(one.pid)]:
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    rank = [word[5:] for word in words if word.startswith(b"RANK=")]
                    if rank:
                        found[int(rank[0])] = pid
        return found


@contextlib.contextmanager
def started(
    commands: Sequence[Sequence[str]], out: Path, own: Sequence[Mapping[str, str]] = ()
) -> Iterator[Training]:
    """Start processes, and end them and all that they have started, whatever happens.

    Args:
        commands: one for each process.
        out: the folder of the run.
        own: variables of each process.
    """
    out.mkdir(parents=True, exist_ok=True)
    log = out / "output.log"
    with log.open("ab") as file:
        processes = [
            ranks.started_process(command, environment(**(own[number] if own else {})), file)
            for number, command in enumerate(commands)
        ]
    try:
        yield Training(processes, out, log)
    finally:
        for one in processes:
            ranks._kill(one)


def script(out: Path, *args: str) -> list[str]:
    """The command of one rank, which `tests.fresh` forks."""
    return arguments(out, *args)


def arguments(out: Path, *args: str) -> list[str]:
    """The script with its arguments, for a launcher; a stopped machine is no silent rank."""
    return [str(SCRIPT), "--out", str(out), "--heartbeat", "600", *args]


def torchrun(
    out: Path, size: int, *args: str, restarts: int = 0, nodes: int = 1
) -> list[list[str]]:
    """The commands of one or more torchruns on this machine, that find each other."""
    meeting = [f"--rdzv-endpoint=127.0.0.1:{ranks.free_port()}", "--rdzv-backend=c10d"]
    return [
        [
            *(sys.executable, "-m", "torch.distributed.run", *meeting, "--rdzv-id=train"),
            *(f"--nnodes={nodes}", f"--nproc-per-node={size // nodes}"),
            *("--local-addr=127.0.0.1", f"--max-restarts={restarts}", *arguments(out, *args)),
        ]
        for _ in range(nodes)
    ]


def plain(out: Path, *args: str) -> dict[int, dict[str, Any]]:
    """Train in one process, undisturbed; the line of each step."""
    with started([script(out, "--tp", "1", *args)], out) as training:
        assert training.wait(120) == [0], training.log.read_text()[-6000:]
    return steps(out)


def lines(out: Path) -> list[dict[str, Any]]:
    """What rank 0 has written, of every start; a line half written is left out."""
    path = out / "losses.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def steps(out: Path) -> dict[int, dict[str, Any]]:
    """The line of each step that counts: that of the last start which came to it."""
    return {line["step"]: line for line in lines(out) if "step" in line}


def assert_as_undisturbed(out: Path, undisturbed: Mapping[int, Mapping[str, Any]]) -> float:
    """Compare every step, those that were computed again included, with those of another run.

    Args:
        out: the folder of the run.
        undisturbed: the line of each step.

    Returns:
        The largest difference of a loss.
    """
    found = [line for line in lines(out) if "step" in line]
    assert {line["step"] for line in found} == set(undisturbed)
    far = 0.0
    for line in found:
        same = undisturbed[line["step"]]
        rows = line["rows"]
        assert rows == same["rows"][: len(rows)] and line["by"] == same["by"], line
        far = max(far, abs(line["loss"] - same["loss"]))
    assert far < NEAR, far
    return far


def kill(pid: int) -> None:
    """SIGKILL, to one process."""
    os.kill(pid, signal.SIGKILL)


def options(out: Path, *args: str) -> list[str]:
    """The script's arguments, for a recipe that names the script itself."""
    return arguments(out, *args)[1:]
