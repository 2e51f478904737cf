"""One way to train, as benchmarks time it.

Nothing here imports isoshard, which a process of plain torch does without.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

BATCHES = 2


@dataclasses.dataclass
class Contestant:
    """A way to train.

    Attributes:
        name: for tables.
        run: `(*batch) -> loss`, which need not wait for the loss.
        load: brings batch number `i` to the devices.
        program: the optimised HLO of the step, once it has run; None where there is none.
        memory: XLA's account of its memory; likewise.
    """

    name: str
    run: Callable[..., Any]
    load: Callable[[int], tuple[Any, ...]]
    program: Callable[[], str] | None = None
    memory: Callable[[], Any] | None = None

    def steps(self, count: int) -> Callable[[], float]:
        """A function without arguments: `count` steps on a few batches, then the loss is read."""
        batches = itertools.cycle([self.load(number) for number in range(BATCHES)])

        def train() -> float:
            for _ in range(count):
                loss = self.run(*next(batches))
            return float(loss)

        return train

    def curve(self, first: int, last: int) -> list[float]:
        """Train on batches `first` to `last` (excluded), and read each loss."""
        return [float(self.run(*self.load(number))) for number in range(first, last)]


def peak_bytes(memory: Any) -> int:
    """Bytes that a program needs on one device: its arguments, outputs and temporaries."""
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
