"""Programs and commands of isoshard in processes of their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests import fresh

_COMMAND = "import sys; from isoshard.cli import dispatch; sys.exit(dispatch.main(sys.argv[1:]))"


class Processes:
    """Runs programs and commands of isoshard, one after the other.

    Args:
        folder: where they run, and what they print is kept.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    def run(
        self, *words: str, shutdown: bool = False, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """`isoshard WORDS`, or a program after "-c"; ended after four minutes.

        Args:
            *words: of the command line.
            shutdown: end as Python does, not by `os._exit` after what is to be run at the end.
            **environment: variables beside those of this process.
        """
        program, *rest = words[1:] if words[0] == "-c" else (_COMMAND, *words)
        options = {"cwd": self._folder, "env": environment, "timeout": 240, "shutdown": shutdown}
        return fresh.run(program, list(map(str, rest)), **options)

    def script(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """`isoshard run-torch-xla WORDS` on eight virtual CPU devices."""
        devices = {"CPU_NUM_DEVICES": "8", "PJRT_DEVICE": "CPU"}
        return self.run("run-torch-xla", *words, **devices | environment)
