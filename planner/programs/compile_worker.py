"""A program compiled in a separate process that can be ended, with its result cached on disk.

The cache has one file for each program, under `$ISOSHARD_PLAN_CACHE`, else
`$XDG_CACHE_HOME/isoshard/plan`, else `~/.cache/isoshard/plan`. A file is written whole or not at
all; those used longest ago go when there are too many bytes.

The process leads a group of its own, so that ending it ends what it started (a CUDA compiler runs
`ptxas`). It ends itself when this process does: it reads a pipe of which this one has the other
end.
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
        folder: where; None is the user's cache.
        limit: bytes that it holds at most.

    Example:
        >>> cache = ProgramCache(Path(tempfile.mkdtemp()))
        >>> cache.put("key", {"text": "HloModule"})
        >>> cache.get("key"), cache.get("other")
        ({'text': 'HloModule'}, None)
    """

    def __init__(self, folder: Path | str | None = None, limit: int = LIMIT):
        """Name a folder; it is made when something is put there."""
        self.folder = Path(folder) if folder is not None else default_folder()
        self.limit = limit

    def get(self, key: str) -> dict[str, Any] | None:
        """What was put there; None if nothing was, or the file is damaged."""
        path = self._path(key)
        try:
            with gzip.open(path, "rt") as file:
                load = json.load(file)
            os.utime(path)
        except (OSError, EOFError, ValueError):
            return None
        return load

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
        """Remove what was used longest ago until the rest fits."""
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
    """The folder that is used if none is named."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "isoshard" / "plan"


WORKER = Path(__file__).with_name("worker.py")
LOCK = Path(tempfile.gettempdir()) / f"isoshard-libtpu-{os.getuid()}.lock"
"""Held while libtpu compiles: one compiler takes all cores. libtpu has a lock of its own, which
refuses instead of waiting; the worker lifts that by `ALLOW_MULTIPLE_LIBTPU_LOAD` (libtpu 0.0.52 has
the variable; two compiles side by side were seen to end), so that others' processes do no harm."""

Listener = Callable[[str, float], None]
"""What is told, some times a second, what is going on and for how many seconds already."""


@dataclasses.dataclass(frozen=True)
class ProgramText:
    """What a compiler made of a step.

    Attributes:
        text: HLO of one device.
        memory: the compiler's statistics, all fields of `memory_analysis()`; {} if it has none.
        cost: its `cost_analysis()`; {} if it has none.
        versions: of jax, jaxlib and the compiler.
        seconds: that the compiler took.
        cached: it was found on disk.
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
    """Compile an exported step, or find what was compiled before.

    Args:
        step: the program.
        target: for what.
        timeout: seconds after which the compiler is ended; None waits.
        progress: a function that is told; True shows a bar, False nothing, None a bar if standard
            error is a terminal.
        cache: whether to look on disk and keep the result there, or the folder.
        python: the interpreter that compiles; see `targets.compiler_python`.

    Raises:
        CompilerMissingError: it is not installed.
        CompilationError: it refused the program.
        CompilationTimeoutError: it took longer than `timeout`.
    """
    interpreter = compiler_python(python)
    versions = check(target.machine, interpreter)
    key = _key(step, target, versions)
    saved = None if cache is False else ProgramCache(None if cache is True else cache)
    result = saved.get(key) if saved else None
    if result is None:
        with _shown(progress, target) as tell:
            result = _made(step, target, interpreter, timeout, tell)
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
    dumps = json.dumps([key, dict(versions), _passed_on(target)], sort_keys=True, default=str)
    digest = hashlib.sha256(step.data)
    digest.update(dumps.encode())
    digest.update(WORKER.read_bytes())
    return digest.hexdigest()


def _passed_on(target: CompileTarget) -> dict[str, str]:
    """What of the environment a target's compiler is told."""
    if target.machine == "tpu":
        return {name: os.environ[name] for name in ("LIBTPU_INIT_ARGS",) if name in os.environ}
    if target.machine == "cuda":
        flags = os.environ.get("XLA_FLAGS", "").split()
        return {"XLA_FLAGS": " ".join(flag for flag in flags if flag.startswith("--xla_gpu"))}
    return {}


def _made(
    step: ExportedStep, target: CompileTarget, python: str, timeout: float | None, tell: Listener
) -> dict[str, Any]:
    ends = None if timeout is None else time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="isoshard-plan-") as name, _alone(target, ends, tell):
        folder = Path(name)
        request = dataclasses.asdict(target) | dataclasses.asdict(step)
        del request["data"]
        (folder / "request.json").write_text(json.dumps(request))
        (folder / "program.bin").write_bytes(step.data)
        _run(folder, target, python, timeout, ends, tell)
        loads: dict[str, Any] = json.loads((folder / "result.json").read_text())
        loads["text"] = (folder / "program.hlo").read_text()
    return loads


def _run(
    folder: Path,
    target: CompileTarget,
    python: str,
    timeout: float | None,
    ends: float | None,
    tell: Listener,
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
            env=environment | _passed_on(target),
            start_new_session=True,
        )
    try:
        while process.poll() is None:
            tell("compiling", time.monotonic() - began)
            if ends is not None and time.monotonic() > ends:
                raise CompilationTimeoutError(
                    f"the compiler for {_name(target)} did not end in {timeout:g} s, and was "
                    "ended. Give it more time by timeout=, write equal layers as one loop "
                    f"(repeat='auto', scan_layers), or take depth={_FASTER[target.machine]!r}"
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
    """End a process and all that it started; none is left behind as a zombie."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


_ASIDE = "Suspected Python Code Location"
"""What XLA's error ends with: lines of the process that compiles."""

_RAISED = re.compile(r"[\w.]+(Error|Exception): ")


def _why(status: int, errors: Path, target: CompileTarget) -> str:
    splitlines = errors.read_text(errors="replace").strip().partition(_ASIDE)[0].splitlines()
    raised = [at for at, line in enumerate(splitlines) if _RAISED.match(line)]
    tail = splitlines[raised[-1] :][:12] if raised else splitlines[-12:]
    last = "\n".join(line[:600] for line in tail) or "it said nothing"
    killed = ""
    if status < 0:
        killed = f" was ended by {signal.Signals(-status).name}"
        killed += " (out of memory?)" if status == -signal.SIGKILL else ""
    return f"the compiler for {_name(target)}{killed or ' failed'}:\n{last}"


def _name(target: CompileTarget) -> str:
    return target.topology or "the host"


@contextlib.contextmanager
def _alone(target: CompileTarget, ends: float | None, tell: Listener) -> Iterator[None]:
    """Context in which no other process of ours compiles by libtpu."""
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
                tell("waiting for another process that compiles by libtpu", waited)
                if ends is not None and time.monotonic() > ends:
                    raise CompilationTimeoutError(
                        f"another process compiled by libtpu for all of {waited:.0f} s: wait for "
                        "it, or give more time by timeout="
                    ) from None
                time.sleep(0.1)
        yield


@contextlib.contextmanager
def _shown(progress: bool | Listener | None, target: CompileTarget) -> Iterator[Listener]:
    """What tells how it goes: the function given, a bar, or nothing."""
    if callable(progress):
        yield progress
        return
    if progress is False or (progress is None and not sys.stderr.isatty()):
        yield lambda _what, _seconds: None
        return
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"{_name(target)}: starting", total=None)
        yield lambda what, _seconds: bar.update(task, description=f"{_name(target)}: {what}")
