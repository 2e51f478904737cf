"""What a case of the suite came to.

>>> Outcome("values", [("words", "'no such axis' for 'dim'")]).reasons()
["words: 'no such axis' for 'dim'"]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

COUNTED = ("pass", "values", "differ", "ranks")
"""All holds; all but words and placements; something else differs; it needs ranks (or a private
function of torch). What torch itself skips (`skipped`) does not count."""


class Outcome(NamedTuple):
    """What a case came to.

    Attributes:
        status: one of `COUNTED`, or `skipped`.
        notes: kind and words of what failed, see `common.noted`.
    """

    status: str
    notes: Sequence[tuple[str, str]] = ()

    def reasons(self) -> list[str]:
        """Why it did not pass, each reason once."""
        return list(dict.fromkeys(f"{kind}: {words}" for kind, words in self.notes))


RANKS_ASKED = (
    "needs the rank of a process",
    "process group has not been initialized",
    "Default process group",
    "Process group cannot be None",
    "env:// rendezvous",
    "not compiled with CUDA",
    "a mesh of device type 'cuda'",
    "failed to convert args to DTensor",  # an operator's arguments are no tensors, or sparse ones
)
"""Words of errors that say that a case has no meaning here; most are about several processes."""


def asks_for_ranks(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, is about ranks."""
    while error is not None:
        if any(words in str(error) for words in RANKS_ASKED):
            return True
        error = error.__cause__ or error.__context__
    return False
