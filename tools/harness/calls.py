"""A function called in new processes: by another Python, with other variables, as several ranks.

    calls.call("benchmarks.scan_layers:measure", "loop", "step", 4, 128)
    calls.together("benchmarks.dtensor:work", 200, variables=calls.ranks(4), limit=300)

Arguments and result are JSON. The process runs this file, which imports nothing but the standard
library and what holds the function, so the other Python need not have isoshard.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Failed(RuntimeError):
    """A call has no result: the function raised, its process ended, or it took too long."""


def call(
    function: str,
    *arguments: Any,
    variables: Mapping[str, str] | None = None,
    limit: float | None = None,
    python: str | Path = sys.executable,
) -> Any:
    """Call a function in a new process; see `together`."""
    (result,) = together(
        function, *arguments, variables=[variables or {}], limit=limit, python=python
    )
    return result


def together(
    function: str,
    *arguments: Any,
    variables: Sequence[Mapping[str, str]],
    limit: float | None = None,
    python: str | Path = sys.executable,
) -> list[Any]:
    """Call a function in several new processes at once.

    Args:
        function: `module:name`.
        arguments: of each call, as JSON can say them.
        variables: of each process, beside those of this one without `XLA_FLAGS`, by which JAX was
            told its devices here.
        limit: seconds, after which the processes and their children are ended.
        python: the interpreter.

    Returns:
        The results.

    Raises:
        Failed: a process has none; what it wrote to its output is printed here.
    """
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.json" for number in range(len(variables))]
        started = []
        for file, own in zip(files, variables, strict=True):
            with file.with_suffix(".log").open("w") as log:
                started.append(
                    subprocess.Popen(
                        [python, __file__, str(file), function, json.dumps(arguments)],
                        cwd=ROOT,
                        env={**kept, **own, "PYTHONPATH": path},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # so that its children end with it
                    )
                )
        end = None if limit is None else time.monotonic() + limit
        try:
            for process in started:
                process.wait(None if end is None else max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Failed(f"took more than {limit:.0f} s") from None
        finally:
            for process in started:
                _end(process)
        codes = [process.returncode for process in started]
        return [_result(file, code) for file, code in zip(files, codes, strict=True)]


def _result(file: Path, code: int) -> Any:
    answer = json.loads(file.read_text()) if file.exists() else {}
    if "result" in answer:
        return answer["result"]
    log = file.with_suffix(".log").read_text()
    print(log, file=sys.stderr)
    last = ([line for line in log.splitlines() if line.strip()] or ["no output"])[-1]
    raise Failed(answer.get("error", f"ended with status {code}: {last.strip()[:200]}"))


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ranks(count: int) -> list[dict[str, str]]:
    """torchrun's variables for the ranks of a world on this machine, and one thread for each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    world |= {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    return [
        {name: str(value) for name, value in {**world, "RANK": n, "LOCAL_RANK": n}.items()}
        for n in range(count)
    ]


def main(file: str, function: str, arguments: str) -> int:
    """Call the function here, and write its result to the file."""
    module, _, name = function.partition(":")
    try:
        answer = {"result": getattr(importlib.import_module(module), name)(*json.loads(arguments))}
    except Exception as error:
        traceback.print_exc()
        message = str(error).strip() or "without a message"
        answer = {"error": f"{type(error).__name__}: {message.splitlines()[0][:200]}"}
    Path(file).write_text(json.dumps(answer))
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # not the folder of this file
    sys.exit(main(*sys.argv[1:]))
