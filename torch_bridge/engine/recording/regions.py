"""Regions of a script that should be one program, or few different ones.

A region looks at every tape that its thread (or asyncio task) executes while it is open. It can
refuse execution altogether (the region then ends with one program), and count how many different
programs the same code records.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from isoshard.core.runtime import metrics

from .recorder import recorder


@dataclasses.dataclass(eq=False)
class Region:
    """A function, or a block of code.

    Attributes:
        name: for error messages and the report of compilations.
        full_graph: nothing may be executed before the region ends.
        max_programs: how many different programs all its runs may record; None for any number.
        programs: hashes of those that it has recorded.
    """

    name: str
    full_graph: bool = False
    max_programs: int | None = None
    programs: set[int] = dataclasses.field(default_factory=set)

    def check(self, tape: Any, *, ended: bool) -> None:
        """Check that a tape may be executed.

        Raises:
            RuntimeError: the region does not allow it.
        """
        if self.full_graph and not ended:
            raise RuntimeError(
                f"{metrics.user_location()}: {self.name} was to be one program (full_graph=True), "
                "but the value of a tensor is needed before it ends. Return the tensor and read it "
                "afterwards (for a Python branch use torch.where), or leave full_graph out."
            )
        if self.max_programs is None:
            return
        digest = hash(tuple(tape.program))
        if digest not in self.programs and len(self.programs) >= self.max_programs:
            raise RuntimeError(
                f"{metrics.user_location()}: {self.name} records another program, and "
                f"max_different_graphs={self.max_programs} were recorded before. New shapes, "
                "static arguments and Python branches make new programs: pad inputs to a few "
                "sizes, pass what changes as a tensor, or allow more."
            )
        self.programs.add(digest)


class inside:
    """Context in which a region is open.

    Args:
        region: the region.
        ended: its code has run, and what it recorded is executed now.
    """

    def __init__(self, region: Region, *, ended: bool = False):
        """See the class."""
        self._entry = (region, ended)

    def __enter__(self) -> None:
        """Open it."""
        current = recorder()
        self._around, current.regions = current.regions, (*current.regions, self._entry)

    def __exit__(self, *exc: object) -> None:
        """Close it."""
        recorder().regions = self._around


def check(tape: Any) -> None:
    """Ask the open regions whether a tape may be executed here.

    Raises:
        RuntimeError: one of them does not allow it.
    """
    for region, ended in recorder().regions:
        region.check(tape, ended=ended)


def name() -> str | None:
    """The name of the innermost open region."""
    regions = recorder().regions
    return regions[-1][0].name if regions else None
