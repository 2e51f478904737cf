"""The entry point of a part's process.

The module of a section has `run(part, options, save)`. It passes results to `save` as it goes,
which writes them to a file, so that the results of a part that crashes or reaches its time limit
are not lost.
"""

from __future__ import annotations

import importlib
import json
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FRAMES = 6
"""Frames of a traceback that are recorded, innermost last."""


class ResultFile:
    """The results of a part so far, mirrored in a JSON file.

    Args:
        path: of the file.

    Attributes:
        results: by name.

    Example:
        >>> import tempfile
        >>> save = ResultFile(Path(tempfile.mkdtemp()) / "part.json")
        >>> save(losses=[2.0, 1.0])
        >>> read(save.path)
        {'losses': [2.0, 1.0]}
    """

    def __init__(self, path: Path):
        """See the class."""
        self.path, self.results = path, dict[str, Any]()

    def __call__(self, **results: Any) -> None:
        """Add results, or replace those of the same names."""
        self.results |= results
        # Replaced in one step: the process may be killed at any time.
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.results))
        new.replace(self.path)


def read(path: Path) -> dict[str, Any]:
    """Read what a `ResultFile` wrote; empty if there is no file.

    Args:
        path: of the file.
    """
    return json.loads(path.read_text()) if path.exists() else {}


def run(section: str, part: str, options: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Run a part in this process.

    Args:
        section: name of the section and of its module.
        part: name of the part.
        options: of the check, see `running.Options`, and of the section.
        path: file for the results.

    Returns:
        "results", and "error" if an exception ended the part.
    """
    save = ResultFile(Path(path))
    try:
        importlib.import_module(f"tools.device_check.{section}").run(part, options, save)
    except Exception as error:
        return {"results": save.results, "error": error_record(error)}
    return {"results": save.results}


def error_record(error: BaseException) -> dict[str, Any]:
    """Describe an exception for the results: its type, message and last frames.

    Args:
        error: the exception.

    Example:
        >>> error_record(ValueError("no such size"))
        {'type': 'ValueError', 'message': 'no such size', 'frames': []}
    """
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
    return {
        "type": type(error).__name__,
        "message": str(error)[:2000],
        "frames": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames],
    }
