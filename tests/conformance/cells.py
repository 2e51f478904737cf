"""One cell of the table: what came of one column of one entry."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Cell:
    """The outcome of one column of one entry.

    Attributes:
        status: `pass`, `wrong` (a value, shape or dtype differs), `error` (an exception), `none`
            (there is nothing to try: `reason` says why), `crash` or `timeout` (of the process).
        passed: samples that agree.
        samples: samples tried.
        reason: of the first sample that does not agree.
        host: an operator was computed on the CPU, because its result's shape depends on values.
    """

    status: str
    passed: int = 0
    samples: int = 0
    reason: str = ""
    host: bool = False

    @property
    def failed(self) -> bool:
        """Whether something that was tried did not pass."""
        return self.status not in ("pass", "none")
