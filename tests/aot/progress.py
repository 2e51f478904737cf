"""What is known already: one line of JSON for each program, written as it comes.

A run that is interrupted goes on where it was. A program has the name of its digest, so what a
change of the sources did not touch is not compiled again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Progress:
    """A file of keyed lines; the last one of a key holds.

    Args:
        path: of the file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Progress(Path(folder) / "v5e.jsonl").note("add", {"status": "pass"})
        ...     Progress(Path(folder) / "v5e.jsonl").found("add")
        {'status': 'pass'}
    """

    def __init__(self, path: Path):
        """See the class."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.last: dict[str, Any] = {}
        """What was noted last."""
        self._kept: dict[str, dict[str, Any]] = {}
        for line in self._lines():
            key, content = json.loads(line)
            self._kept[key] = self.last = content

    def _lines(self) -> list[str]:
        """The lines of the file, which is made if there is none; one that was cut off is not."""
        self.path.touch()
        *lines, cut = self.path.read_text().split("\n")
        if cut:
            self.path.write_text("".join(f"{line}\n" for line in lines))
        return lines

    def found(self, key: str) -> dict[str, Any] | None:
        """What was noted, if anything.

        Args:
            key: what of.
        """
        return self._kept.get(key)

    def note(self, key: str, content: Mapping[str, Any]) -> None:
        """Write down.

        Args:
            key: what of.
            content: that JSON can hold.
        """
        self._kept[key] = self.last = dict(content)
        with self.path.open("a") as file:
            file.write(json.dumps([key, content]) + "\n")
