"""Which units run: those that a change reaches, and a sample of the rest.

>>> len(drawn([f"unit {number}" for number in range(600)], seed="6f1c", one_in=6))
100
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable
from pathlib import Path

from . import sources
from .record import Record


@dataclasses.dataclass(frozen=True)
class Choice:
    """What runs, and why.

    Attributes:
        reached: units without a record, or whose files changed since.
        sample: some of the others.
        left: the rest.
        seed: that the sample was drawn by.
    """

    reached: tuple[str, ...]
    sample: tuple[str, ...]
    left: tuple[str, ...]
    seed: str

    @property
    def units(self) -> tuple[str, ...]:
        """All that runs."""
        return self.reached + self.sample

    def __str__(self) -> str:
        """One line for the terminal."""
        known = len(self.reached) + len(self.sample) + len(self.left)
        return (
            f"{len(self.units)} of {known} run: {len(self.reached)} that have no record of these "
            f"files, and a sample of {len(self.sample)} (seed {self.seed})"
        )


def seed_of(root: Path = sources.ROOT) -> str:
    """A seed that every change of the package draws anew, and that is the same for the same one."""
    return sources.digest(sources.package(root), root)


def choose(units: Iterable[str], record: Record | None, *, one_in: int, seed: str) -> Choice:
    """Decide what runs.

    Args:
        units: all there are.
        record: of those that passed; None if there is none that holds.
        one_in: the sample is one of so many.
        seed: draws the sample.

    Returns:
        Each unit in one of three places.
    """
    reached, rest = [], []
    for unit in units:
        known = record is not None and record.unchanged(unit)
        (rest if known else reached).append(unit)
    sample = drawn(rest, seed=seed, one_in=one_in)
    left = tuple(unit for unit in rest if unit not in sample)
    return Choice(tuple(reached), tuple(u for u in rest if u in sample), left, seed)


def drawn(units: Iterable[str], *, seed: str, one_in: int) -> frozenset[str]:
    """The share of some units that a seed draws, at least one; every process draws the same."""
    order = sorted(units, key=lambda unit: hashlib.sha256(f"{seed} {unit}".encode()).digest())
    return frozenset(order[: math.ceil(len(order) / one_in)])
