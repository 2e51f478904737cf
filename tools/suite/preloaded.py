"""Runs of pytest in forks of a process that has imported torch and JAX: five seconds less for each.

A line on standard input asks for a run, in JSON: the folder of the package, pytest's arguments, the
file for what it prints, and a limit in seconds. Its exit status is the line of the answer.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import warnings
from typing import Any

from tools.harness.slow_imports import SLOW_IMPORTS

IMPORTED = (*SLOW_IMPORTS, "pytest")


def _run(request: dict[str, Any]) -> int:
    package = request["package"]
    os.environ["PYTHONPATH"] = package
    os.environ["PATH"] = f"{package}/bin:{os.environ['PATH']}"
    sys.path.insert(0, package)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for printed in (1, 2):
        os.dup2(output, printed)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    import pytest

    return int(pytest.main(request["arguments"]))


def main() -> None:
    """Serve until standard input ends."""
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns of forks; it has no threads yet
            child = os.fork()
        if not child:
            os.setsid()
            code = 3  # pytest's, of an error of its own
            try:
                code = _run(request)
            finally:
                sys.stdout.flush()
                os._exit(code)
        signal.signal(signal.SIGALRM, lambda *_, child=child: os.killpg(child, signal.SIGKILL))
        signal.alarm(request["limit"])
        _, status = os.waitpid(child, 0)
        signal.alarm(0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
