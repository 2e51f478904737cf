"""Probes in a process that may hang or die.

A broken driver does not raise: it hangs, or takes the process with it. So the probes run in a
child, one after another, and the parent reads one line for each. When a probe outlives its time
or the child dies under it, that is its result, and a new child goes on with the next one.

>>> [result.status for result in survey(["devices", "shard"], devices=2)]
['works', 'works']
"""

from __future__ import annotations

import dataclasses
import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO

from .probes import FAILS, Result, advice, run

_MARK = "isoshard-probe "


def survey(
    names: Sequence[str], *, devices: int | None = None, timeout: float = 60.0
) -> Iterator[Result]:
    """Run probes, and yield each result as it arrives.

    Args:
        names: which of `probes.PROBES`, in this order.
        devices: simulate so many CPU devices; None uses the available devices.
        timeout: seconds one probe may take; the first of a child has the child's start on top.

    Yields:
        One result per name, also if the child process dies.
    """
    todo = list(names)
    while todo:
        for result in _run_child(tuple(todo), devices, timeout):
            todo.remove(result.name)
            yield result


def _run_child(names: Sequence[str], devices: int | None, timeout: float) -> Iterator[Result]:
    """Yield results until all are reported, or until one during which the child died."""
    command = [sys.executable, "-P", "-m", "isoshard.cli.survey", str(devices or 0), *names]
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            lines = _lines_of(child)
            for name in names:
                start = time.perf_counter()
                line = _next(lines, timeout)
                if line.startswith(_MARK):
                    yield Result(**json.loads(line.removeprefix(_MARK)))
                    continue
                reason = line or _last_line(child, errors)
                yield Result(name, FAILS, reason, advice(name), time.perf_counter() - start)
                return
        finally:
            child.kill()
            child.wait()


def _lines_of(child: subprocess.Popen[str]) -> queue.Queue[str]:
    """The child's results as a queue, "" at its end; what libraries print is dropped."""
    lines: queue.Queue[str] = queue.Queue()

    def read(stream: IO[str]) -> None:
        with stream:
            for line in stream:
                if line.startswith(_MARK):
                    lines.put(line)
        lines.put("")

    threading.Thread(target=read, args=(child.stdout,), daemon=True).start()
    return lines


def _next(lines: queue.Queue[str], timeout: float) -> str:
    try:
        return lines.get(timeout=timeout)
    except queue.Empty:
        return f"no answer within {timeout:g} s"


def _last_line(child: subprocess.Popen[str], errors: IO[str]) -> str:
    """Why a child ended early, from its exit status and the last line of its stderr."""
    status = child.wait()
    cause = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    errors.seek(0)
    lines = errors.read().strip().splitlines()
    return f"the process ended ({cause})" + (f": {lines[-1]}" if lines else "")


def _main(argv: Sequence[str]) -> None:
    """Be the child: simulate `argv[0]` devices unless it is 0, then run the probes named."""
    if int(argv[0]):
        import isoshard

        isoshard.simulate_devices(int(argv[0]))
    for name in argv[1:]:
        print(_MARK + json.dumps(dataclasses.asdict(run(name))), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
