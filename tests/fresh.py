"""A new process in which torch, JAX and isoshard are imported: 0.3 s, in place of five.

A server imports them once for all processes of pytest, without starting JAX's backend, and forks
for each program. So a program finds no device chosen, no mesh, and no state of other tests. What
tests an import, or variables that are read while it runs, takes `subprocess.run`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.harness.slow_imports import SLOW_IMPORTS

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 120.0
IMPORTED = (
    *(*SLOW_IMPORTS, "isoshard", "isoshard.torch_bridge", "isoshard.cli.dispatch"),
    *("isoshard.torch_xla_bridge.torch_xla", "transformers.models.llama.modeling_llama"),
)
_ADDRESS = "ISOSHARD_TESTS_SERVER"
"""What the processes of pytest that share a server find its address by."""
WITHOUT = ("JAX_NUM_CPU_DEVICES", _ADDRESS)
"""A program has the one device of users, and the quick compiler of tests/conftest.py."""

_SHUTDOWN = "ISOSHARD_TESTS_SHUTDOWN"

used = 0.0
"""Seconds of processor of the programs that have ended."""


class Process:
    """A program that was started, as `subprocess.Popen` tells of it.

    Attributes:
        pid: of the process, which leads a process group.
        returncode: its exit status, minus the signal that ended it; None before its end.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        """Ask the server for it."""
        self._answers = socket.socket(socket.AF_UNIX)
        self._answers.connect(_server())
        own = {"cores": sorted(os.sched_getaffinity(0))}
        self._answers.sendall(json.dumps(own | request).encode() + b"\n")
        self._lines = self._answers.makefile()
        if not (started := self._lines.readline()):
            raise RuntimeError("the server of tests/fresh.py ended; its errors are above")
        self.pid = int(started)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status; None while the program runs."""
        if self.returncode is None and select.select([self._answers], [], [], 0)[0]:
            global used
            status, seconds = self._lines.readline().split()
            self.returncode = int(status)
            used += float(seconds)
            self._lines.close()
            self._answers.close()
        return self.returncode

    def wait(self, timeout: float = TIMEOUT) -> int:
        """Wait for the end.

        Args:
            timeout: seconds, after which the program and what it started are killed.

        Returns:
            The exit status.

        Raises:
            subprocess.TimeoutExpired: it took longer.
        """
        if self.returncode is None and not select.select([self._answers], [], [], timeout)[0]:
            os.killpg(self.pid, signal.SIGKILL)
            self._answers.close()
            self._lines.close()
            self.returncode = -signal.SIGKILL
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        found = self.poll()
        assert found is not None
        return found


def start(
    command: Sequence[str | Path],
    *,
    cwd: str | Path,
    env: Mapping[str, str],
    output: str | Path,
    errors: str | Path | None = None,
) -> Process:
    """Start a Python file in a process of its own.

    Args:
        command: the file, and the program's arguments.
        cwd: where it runs.
        env: all its variables.
        output: the file to which what it prints is added.
        errors: the same for its errors; None for one file.
    """
    printed = [os.fspath(path) for path in (output, errors or output)]
    request = {"argv": list(map(os.fspath, command)), "cwd": os.fspath(cwd), "printed": printed}
    return Process(request | {"env": dict(env)})


def run(
    program: str | Path,
    arguments: Sequence[str] = (),
    *,
    cwd: str | Path,
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
    shutdown: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, as `subprocess.run([sys.executable, ..])` does.

    Args:
        program: source text, or the path of a file.
        arguments: of the program, from `sys.argv[1]` on.
        cwd: where it runs, and where what it prints is kept.
        env: variables beside those of this process.
        timeout: seconds, after which the program and what it started are killed.
        shutdown: take the interpreter apart at the end, as Python does, which takes a second.

    Returns:
        Exit status (minus the signal that ended it), what it printed, and its errors.

    Raises:
        subprocess.TimeoutExpired: it took longer.
    """
    folder = Path(cwd)
    if isinstance(program, str):
        path = folder / "program.py"
        path.write_text(program)
        program = path
    kept = {key: value for key, value in os.environ.items() if key not in WITHOUT}
    files = [folder / f".{Path(program).stem}.{name}" for name in ("out", "err")]
    for file in files:
        file.unlink(missing_ok=True)
    command = [program, *arguments]
    variables = kept | dict(env or {})
    if shutdown:
        variables[_SHUTDOWN] = "1"
    process = start(command, cwd=cwd, env=variables, output=files[0], errors=files[1])
    status = process.wait(timeout)
    out, err = (path.read_text(errors="replace") for path in files)
    return subprocess.CompletedProcess(command, status, out, err)


@functools.cache
def _server() -> str:
    """The address of the server, which ends with the process that asked for it first.

    Until a program is wanted it imports nothing.
    """
    if _ADDRESS in os.environ:
        return f"\0{os.environ[_ADDRESS]}"
    # An abstract address: no file, and no longer than the 107 bytes that one may have.
    address = f"isoshard-tests-{os.getpid()}-{os.urandom(4).hex()}"
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = {key: value for key, value in os.environ.items() if key not in WITHOUT}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fresh", address],
        cwd=ROOT,
        env={"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} | environment | one | {"JAX_PLATFORMS": "cpu"},
        stdin=subprocess.PIPE,  # its end is this process's
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_end, process)
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise RuntimeError("the server of tests/fresh.py did not start")
    return f"\0{address}"


def share() -> None:
    """Let the processes that this one starts ask its server."""
    os.environ[_ADDRESS] = _server()[1:]


def _end(server: subprocess.Popen[str]) -> None:
    """By its standard input, so that pytest counts the processor time of what it ran."""
    assert server.stdin is not None and server.stdout is not None
    server.stdin.close()
    server.stdout.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(5)
    server.kill()


def _next_program(address: str) -> dict[str, Any]:
    """Wait for programs, and fork for each; returns in the child, and ends with the parent."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"\0{address}")
    listening.listen()
    print("ready", flush=True)
    if sys.stdin in select.select([listening, sys.stdin], [], [])[0]:
        sys.exit()
    from tests.host import collect_rarely, use_recorded_rates  # imports JAX

    gc.disable()
    for name in IMPORTED:
        importlib.import_module(name)
    use_recorded_rates()
    gc.enable()
    collect_rarely()
    gc.collect()
    gc.freeze()
    running: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor that tells of the end
    while True:
        ready, _, _ = select.select([listening, sys.stdin, *running], [], [])
        for ended in running.keys() & set(ready):
            child, asked = running.pop(ended)
            os.close(ended)
            _, status, took = os.wait4(child, 0)
            seconds = took.ru_utime + took.ru_stime
            with asked, contextlib.suppress(BrokenPipeError):
                asked.sendall(f"{os.waitstatus_to_exitcode(status)} {seconds}\n".encode())
        if sys.stdin in ready:
            for child, _ in running.values():
                os.killpg(child, signal.SIGKILL)
            sys.exit()
        if listening not in ready:
            continue
        asked, _ = listening.accept()
        with asked.makefile() as lines:
            request = json.loads(lines.readline())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns of forks; it has no threads yet
            child = os.fork()
        if not child:
            os.setsid()
            for connected in (asked, listening, *(other for _, other in running.values())):
                connected.close()
            for ended in running:
                os.close(ended)
            return request
        asked.sendall(f"{child}\n".encode())
        running[os.pidfd_open(child)] = child, asked


def _become(request: Mapping[str, Any]) -> None:
    """Make this process what a command line would have started."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.sched_setaffinity(0, request["cores"])
    os.chdir(request["cwd"])
    adding = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    files = [os.open(os.devnull, os.O_RDONLY)]
    files += [os.open(path, adding, 0o644) for path in request["printed"]]
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.argv = request["argv"]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    path = request["env"].get("PYTHONPATH", "")
    sys.path[1:1] = [one for one in path.split(os.pathsep) if one and one not in sys.path]


def _ran(path: str) -> int:
    """Run a program as far as its end, which takes a second of taking modules apart less."""
    code: Any = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    if _SHUTDOWN not in os.environ:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    _become(_next_program(sys.argv[1]))
    status = _ran(sys.argv[0])
    if _SHUTDOWN not in os.environ:
        os._exit(status)
    sys.exit(status)
