"""A table of mistakes that newcomers make: code that makes one, and what they are told.

    @mistake(SpecError, "no mesh axis is called 'z'", "The mesh axes are 'x' (2), 'y' (4)")
    def an_axis_that_the_mesh_lacks(at):
        iso.shard(np.ones((8, 4)), at.mesh, P("z"))

The class is that of the error, or of the warning where the code goes on. Each text stands in the
message: what is wrong and where, and the way out.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path

import isoshard as iso


@dataclasses.dataclass
class Desk:
    """Where a newcomer sits: a mesh of 2 x 4, named "x" and "y", and an empty folder."""

    folder: Path
    mesh: iso.Mesh = dataclasses.field(default_factory=lambda: iso.make_mesh((2, 4), ("x", "y")))


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        make: makes it.
        told: the class of the error, or of the warning.
        texts: parts of the message: what is wrong and where, and the way out.
    """

    make: Callable[[Desk], object]
    told: type[BaseException]
    texts: tuple[str, ...]

    @property
    def name(self) -> str:
        """What is wrong, in words."""
        return f"{self.make.__module__.rpartition('.')[2]}-{self.make.__name__}"


MISTAKES: list[Mistake] = []


def mistake(told: type[BaseException], *texts: str) -> Callable[[Callable], Callable]:
    """Enter a mistake into the table; see the module."""

    def enter(make: Callable[[Desk], object]) -> Callable[[Desk], object]:
        MISTAKES.append(Mistake(make, told, texts))
        return make

    return enter


def outcome(one: Mistake, desk: Desk) -> BaseException | None:
    """What a newcomer is told: the error, else the last warning; None if nothing."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            one.make(desk)
        except Exception as error:
            return error
    ours = [warning.message for warning in heard if isinstance(warning.message, Warning)]
    return ours[-1] if ours else None
