"""What a run of the suite is asked for, in one worker process."""

from __future__ import annotations


class Settings:
    """What a run of the suite is asked for.

    Attributes:
        devices: `NUM_DEVICES`, the world of a test that does not say another.
        choices: of the placements of an operator's arguments, at most so many are tried.
        strict: an assertion about placements ends a case, as any other.
    """

    devices = 4
    choices: int | None = None
    strict = False
