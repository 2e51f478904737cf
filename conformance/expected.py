"""The cells that are known not to pass, each with its reason.

The list is strict: a cell named here that passes fails the run, and so does one that fails and is
not named. A wrong value has no place here.
"""

from __future__ import annotations

EXPECTED: dict[tuple[str, str], str] = {}
"""(entry, column) -> reason."""
