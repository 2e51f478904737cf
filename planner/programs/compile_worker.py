"""Compilation in a separate process that can be ended, with results cached on disk.

The cache has one file for each program, under `$ISOSHARD_PLAN_CACHE`, else
`$XDG_CACHE_HOME/isoshard/plan`, else `~/.cache/isoshard/plan`. Files are written atomically; the
least recently used ones are removed when the cache is too large.

The process leads a process group of its own, so that ending it ends its children (a CUDA compiler
runs `ptxas`). It ends itself when this process ends: it reads a pipe that this one holds open.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gzip
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .exporting import ExportedStep
from .targets import (
    CompilationError,
    CompilationTimeoutError,
    CompileTarget,
    check,
    compiler_python,
)

VARIABLE = "ISOSHARD_PLAN_CACHE"
LIMIT = 1 << 30
"""Bytes that the cache holds at most."""


class ProgramCache:
    """A folder of compiled programs.

    Args:
        folder: of the cache; None is the user's.
        limit: bytes that it holds at most.

    Example:
        >>> cache = ProgramCache(Path(tempfile.mkdtemp()))
        >>> cache.put("key", {"text": "HloModule"})
        >>> cache.get("key"), cache.get("other")
        ({'text': 'HloModule'}, None)
    """

    def __init__(self, folder: Path | str | None = None, limit: int = LIMIT):
        """The folder is created when something is stored."""
        self.folder = Path(folder) if folder is not None else default_folder()
        self.limit = limit

    def get(self, key: str) -> dict[str, Any] | None:
        """The stored value; None without one, or if the file is damaged."""
        path = self._path(key)
        try:
            with gzip.open(path, "rt") as file:
                content = json.load(file)
            os.utime(path)
        except (OSError, EOFError, ValueError):
            return None
        return content

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Store a value."""
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.folder, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as raw:
                with gzip.open(raw, "wt", compresslevel=3) as file:
                    json.dump(value, file)
            Path(name).replace(self._path(key))
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        self._shrink()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json.gz"

    def _shrink(self) -> None:
        """Remove the least recently used files until the rest fits."""
        files = []
        for path in self.folder.glob("*.json.gz"):
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                stat = path.stat()
                files.append((stat.st_mtime_ns, stat.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files, key=lambda name: name[0])[:-1]:
            if total <= self.limit:
                return
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            total -= size


def default_folder() -> Path:
    """The folder of the user's cache."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "isoshard" / "plan"


WORKER = Path(__file__).with_name("worker.py")
LOCK = Path(tempfile.gettempdir()) / f"isoshard-libtpu-{os.getuid()}.lock"
"""Locked while libtpu compiles: one compiler takes all cores. libtpu has a lock of its own, which
fails instead of waiting; the worker disables it by `ALLOW_MULTIPLE_LIBTPU_LOAD` (libtpu 0.0.52 has
the variable; two compilations at once completed), so that other processes do no harm."""

Listener = Callable[[str, float], None]
"""A callback, called some times a second with the activity and the seconds that it has taken."""


@dataclasses.dataclass(frozen=True)
class ProgramText:
    """A compiled step.

    Attributes:
        text: HLO of one device.
        memory: the compiler's statistics, all fields of `memory_analysis()`; {} if it has none.
        cost: its `cost_analysis()`; {} if it has none.
        versions: of jax, jaxlib and the compiler.
        seconds: that the compiler took.
        cached: whether it was read from disk.
    """

    text: str
    memory: Mapping[str, int]
    cost: Mapping[str, float]
    versions: Mapping[str, str]
    seconds: float
    cached: bool = False


def compiled(
    step: ExportedStep,
    target: CompileTarget,
    *,
    timeout: float | None = None,
    progress: bool | Listener | None = None,
    cache: bool | Path | str = True,
    python: str | None = None,
) -> ProgramText:
    """Compile an exported step, or read its result from the cache.

    Args:
        step: the program.
        target: the machine to compile for.
        timeout: seconds after which the compiler is ended; None waits.
        progress: a callback; True shows a bar, False nothing, None a bar if standard error is a
            terminal.
        cache: whether to use the cache on disk, or its folder.
        python: the interpreter that compiles; see `targets.compiler_python`.

    Raises:
        CompilerMissingError: it is not installed.
        CompilationError: the compiler failed.
        CompilationTimeoutError: it took longer than `timeout`.
    """
    interpreter = compiler_python(python)
    versions = check(target.machine, interpreter)
    key = _key(step, target, versions)
    saved = None if cache is False else ProgramCache(None if cache is True else cache)
    result = saved.get(key) if saved else None
    if result is None:
        with _listener(progress, target) as report:
            result = _compile(step, target, interpreter, timeout, report)
        if saved:
            saved.put(key, result)
        return _as_text(result, cached=False)
    return _as_text(result, cached=True)


def _as_text(result: Mapping[str, Any], *, cached: bool) -> ProgramText:
    names = ("text", "memory", "cost", "versions", "seconds")
    return ProgramText(*(result[name] for name in names), cached=cached)


def _key(step: ExportedStep, target: CompileTarget, versions: Mapping[str, str]) -> str:
    """A digest of all that the result depends on."""
    key = dataclasses.asdict(target) | dataclasses.asdict(step) | {"data": None}
    dumps = json.dumps([key, dict(versions), _environment(target)], sort_keys=True, default=str)
    digest = hashlib.sha256(step.data)
    digest.update(dumps.encode())
    digest.update(WORKER.read_bytes())
    return digest.hexdigest()


def _environment(target: CompileTarget) -> dict[str, str]:
    """The environment variables that reach a target's compiler."""
    if target.machine == "tpu":
        return {name: os.environ[name] for name in ("LIBTPU_INIT_ARGS",) if name in os.environ}
    if target.machine == "cuda":
        flags = os.environ.get("XLA_FLAGS", "").split()
        return {"XLA_FLAGS": " ".join(flag for flag in flags if flag.startswith("--xla_gpu"))}
    return {}


def _compile(
    step: ExportedStep, target: CompileTarget, python: str, timeout: float | None, report: Listener
) -> dict[str, Any]:
    deadline = None if timeout is None else time.monotonic() + timeout
    with (
        tempfile.TemporaryDirectory(prefix="isoshard-plan-") as name,
        _exclusive(target, deadline, report),
    ):
        folder = Path(name)
        request = dataclasses.asdict(target) | dataclasses.asdict(step)
        del request["data"]
        (folder / "request.json").write_text(json.dumps(request))
        (folder / "program.bin").write_bytes(step.data)
        _run(folder, target, python, timeout, deadline, report)
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        result["text"] = (folder / "program.hlo").read_text()
    return result


def _run(
    folder: Path,
    target: CompileTarget,
    python: str,
    timeout: float | None,
    deadline: float | None,
    report: Listener,
) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment.pop("XLA_FLAGS", None)
    errors = folder / "stderr.txt"
    began = time.monotonic()
    with errors.open("wb") as file:
        process = subprocess.Popen(
            [python, "-P", str(WORKER), str(folder)],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            env=environment | _environment(target),
            start_new_session=True,
        )
    try:
        while process.poll() is None:
            report("compiling", time.monotonic() - began)
            if deadline is not None and time.monotonic() > deadline:
                raise CompilationTimeoutError(
                    f"the compiler for {_name(target)} did not finish in {timeout:g} s, and was "
                    "ended. Raise timeout=, write equal layers as one loop (repeat='auto', "
                    f"scan_layers), or use depth={_FASTER[target.machine]!r}"
                )
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
    finally:
        _end(process)
    if process.returncode or not (folder / "result.json").exists():
        raise CompilationError(_why(process.returncode, errors, target))


_FASTER = {"host": "trace", "tpu": "partition", "cuda": "partition"}
"""Of a target, the depth that takes less time."""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group, and wait, so that no zombie remains."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


_LOCATION = "Suspected Python Code Location"
"""XLA's errors end with lines of the process that compiles, after this title."""

_RAISED = re.compile(r"[\w.]+(Error|Exception): ")


def _why(status: int, errors: Path, target: CompileTarget) -> str:
    lines = errors.read_text(errors="replace").strip().partition(_LOCATION)[0].splitlines()
    raised = [at for at, line in enumerate(lines) if _RAISED.match(line)]
    tail = lines[raised[-1] :][:12] if raised else lines[-12:]
    last = "\n".join(line[:600] for line in tail) or "it printed no error"
    killed = ""
    if status < 0:
        killed = f" was ended by {signal.Signals(-status).name}"
        killed += " (out of memory?)" if status == -signal.SIGKILL else ""
    return f"the compiler for {_name(target)}{killed or ' failed'}:\n{last}"


def _name(target: CompileTarget) -> str:
    return target.topology or "the host"


@contextlib.contextmanager
def _exclusive(target: CompileTarget, deadline: float | None, report: Listener) -> Iterator[None]:
    """Context in which no other process of isoshard compiles by libtpu."""
    if target.machine != "tpu":
        yield
        return
    began = time.monotonic()
    with LOCK.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - began
                report("waiting for another process that compiles by libtpu", waited)
                if deadline is not None and time.monotonic() > deadline:
                    raise CompilationTimeoutError(
                        f"another process has compiled by libtpu for {waited:.0f} s: wait for it, "
                        "or raise timeout="
                    ) from None
                time.sleep(0.1)
        yield


@contextlib.contextmanager
def _listener(progress: bool | Listener | None, target: CompileTarget) -> Iterator[Listener]:
    """The progress callback: the caller's, a bar, or one that does nothing."""
    if callable(progress):
        yield progress
        return
    if progress is False or (progress is None and not sys.stderr.isatty()):
        yield lambda _activity, _seconds: None
        return
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"{_name(target)}: starting", total=None)
        yield lambda activity, _seconds: bar.update(
            task, description=f"{_name(target)}: {activity}"
        )
