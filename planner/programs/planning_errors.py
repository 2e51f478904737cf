"""What may go wrong where a program is compiled for a machine that is not here."""

from __future__ import annotations

from isoshard.core.errors import CodedError


class PlanningError(CodedError, RuntimeError, code="ISO040"):
    """A step could not be planned at the depth asked for; the message says what to do."""


class CompilerMissingError(PlanningError, code="ISO041"):
    """The target's compiler is not installed; the message has the line that installs it."""


class CompilationError(PlanningError, code="ISO042"):
    """The target's compiler refused the program; the message ends with its words."""


class CompilationTimeoutError(PlanningError, TimeoutError, code="ISO043"):
    """The compiler did not end in the time that was given; its process has been ended."""
