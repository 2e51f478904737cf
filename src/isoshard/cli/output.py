"""Where commands print."""

from __future__ import annotations

from rich.console import Console


class Output(Console):
    """A console that raises `BrokenPipeError` if its reader ends first, as `print` does."""

    def on_broken_pipe(self) -> None:
        """Raise: rich itself ends the process with 1, which has a meaning for these commands."""
        raise BrokenPipeError
