"""The compiler of a target that is not here, in a process that may end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from isoshard.planner.programs.targets import CompileTarget

SCRIPT = Path(__file__).with_name("compiling.py")
START = 180.0
"""Seconds that a compiler has to set itself up."""


class Compiled(NamedTuple):
    """What became of one program.

    Attributes:
        status: "pass", "refused", "crash" or "timeout".
        reason: why it did not pass.
        seconds: what it took.
    """

    status: str
    reason: str
    seconds: float


class Compiler:
    """Compiles one program after another; a process that ends at one is replaced for the next.

    Args:
        target: what for.
        python: an interpreter that has the compiler.
        devices: how many of the target's devices programs have at most.
        limit: seconds for one program.
        script: what the interpreter runs; None for `compiling.py`.
    """

    def __init__(
        self,
        target: CompileTarget,
        python: Path,
        *,
        devices: int = 8,
        limit: float = 120.0,
        script: Path | None = None,
    ):
        """See the class."""
        self.versions: Mapping[str, str] = {}
        self._target, self._devices = target, devices
        self._command, self._limit = (python, "-P", script or SCRIPT), limit
        self._folder = tempfile.TemporaryDirectory(prefix="isoshard-aot-")
        self._process: subprocess.Popen[bytes] | None = None
        self._came = b""

    def __enter__(self) -> Compiler:
        """Nothing starts before the first program."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process and what it started."""
        self._end()
        self._folder.cleanup()

    def compile(self, request: Mapping[str, Any]) -> Compiled:
        """Compile one program.

        Args:
            request: what the script is asked: one line of JSON.

        Raises:
            RuntimeError: the compiler cannot be set up; with what it wrote.
        """
        process = self._process or self._start()
        started = time.monotonic()
        stdin = process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; that is what is read next
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
        line = self._line(process, self._limit)
        seconds = round(time.monotonic() - started, 3)
        if line is None:
            self._end()
            return Compiled("timeout", f"not done after {self._limit:.0f} s", seconds)
        if not line:
            said = self._said()
            self._end()
            return Compiled("crash", said, seconds)
        answer = json.loads(line)
        return Compiled(answer["status"], answer.get("reason", ""), answer["seconds"])

    def _start(self) -> subprocess.Popen[bytes]:
        folder = Path(self._folder.name)
        asked = dataclasses.asdict(self._target) | {"devices": self._devices}
        (folder / "target.json").write_text(json.dumps(asked))
        if not Path(self._command[0]).exists():
            raise RuntimeError(
                f"there is no {self._command[0]}: make it by python -m benchmarks.environments aot "
                "(6 GB), or name an interpreter that has the compilers by --python"
            )
        with (folder / "errors").open("wb") as errors:
            self._process = process = subprocess.Popen(
                [*self._command, folder / "target.json"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={name: v for name, v in os.environ.items() if not name.startswith("JAX_")},
                start_new_session=True,
            )
        self._came = b""
        line = self._line(process, START)
        answer = json.loads(line) if line else {}
        if not answer.get("ready"):
            said = self._said()
            self._end()
            raise RuntimeError(
                f"the compiler for {self._target.topology or self._target.machine} cannot start "
                f"in {self._command[0]}: {said}"
            )
        self.versions = answer.get("versions", {})
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _line(self, process: subprocess.Popen[bytes], limit: float) -> bytes | None:
        """The answer that comes next: b"" if the process ended, None if it is too late."""
        assert process.stdout is not None
        end = time.monotonic() + limit
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                line, more, rest = self._came.partition(b"\n")
                if more:
                    self._came = rest
                    if line.startswith(b"{"):  # compilers write lines of their own
                        return line
                    continue
                left = end - time.monotonic()
                if left <= 0 or not selector.select(left):
                    return None
                read = os.read(process.stdout.fileno(), 1 << 16)
                if not read:
                    return b""
                self._came += read

    def _said(self) -> str:
        """The end of what the process wrote to its standard error."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        errors = Path(self._folder.name) / "errors"
        lines = errors.read_text(errors="replace").split("\n")
        told = [line for line in lines if line.strip() and "WARNING" not in line]
        status = self._process.returncode if self._process is not None else None
        words = " ".join(" ".join(told[-6:]).split())[:300]
        return f"status {status}: {words or 'it said nothing'}"
