"""What may go wrong where a program is compiled for a machine that is not here."""

from __future__ import annotations


class PlanningError(RuntimeError):
    """A step could not be planned at the depth asked for; the message says what to do."""


class CompilerMissingError(PlanningError):
    """The target's compiler is not installed; the message has the line that installs it."""


class CompilationError(PlanningError):
    """The target's compiler refused the program; the message ends with its words."""


class CompilationTimeoutError(PlanningError, TimeoutError):
    """The compiler did not end in the time that was given; its process has been ended."""
