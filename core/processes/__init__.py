"""Many processes, one run: starting them together, agreeing, and ending when one fails."""

if __name__ != "isoshard.core.processes":
    raise ImportError(f"import isoshard.core.processes, not {__name__}")

from .agreement import assert_equal
from .start import Processes, init_distributed
from .termination import Termination

__all__ = ["Processes", "Termination", "assert_equal", "init_distributed"]
