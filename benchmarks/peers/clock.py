"""How every peer is timed.

>>> found = timed(lambda x: x, lambda number: (float(number),), steps=2, rounds=3, curve=2)
>>> found["losses"], sorted(found)
([0.0, 1.0], ['best_ms', 'losses', 'median_ms'])
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

from tools.harness import timing

BATCHES = 2
CURVE = 4  # steps whose losses are compared
ROUNDS = 3


def timed(
    run: Callable[..., Any],
    load: Callable[[int], tuple[Any, ...]],
    *,
    steps: int,
    rounds: int = ROUNDS,
    curve: int = CURVE,
    read: Callable[[Any], float] = float,
) -> dict[str, Any]:
    """Train a few steps for the losses, then time rounds of steps.

    Args:
        run: `(*batch) -> loss`, which need not wait.
        load: brings batch number `i` to the devices.
        steps: of a round, after which the loss is read.
        rounds: timed rounds, after one that does not count.
        curve: steps whose losses are reported.
        read: waits for a loss.

    Returns:
        Losses, and the median and best milliseconds of a step.
    """
    losses = [read(run(*load(number))) for number in range(curve)]
    batches = itertools.cycle([load(number) for number in range(BATCHES)])

    def several() -> None:
        for _ in range(steps):
            loss = run(*next(batches))
        read(loss)

    several()
    taken = [timing.seconds(several) / steps * 1e3 for _ in range(rounds)]
    return {"losses": losses, "median_ms": statistics.median(taken), "best_ms": min(taken)}
