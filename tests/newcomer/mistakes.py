"""What the tests of mistakes share."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path

import isoshard as iso


@dataclasses.dataclass
class Desk:
    """A mesh of 2 x 4, named "x" and "y", and an empty folder."""

    folder: Path
    mesh: iso.Mesh = dataclasses.field(default_factory=lambda: iso.make_mesh((2, 4), ("x", "y")))


def told(make: Callable[[Desk], object], desk: Desk) -> BaseException | None:
    """The error that a mistake raises, else its last warning; None if there is neither."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            make(desk)
        except Exception as error:
            return error
    ours = [warning.message for warning in heard if isinstance(warning.message, Warning)]
    return ours[-1] if ours else None
