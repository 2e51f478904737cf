"""How every peer is timed, and how it reports: one JSON object as the last line of its output.

>>> found = timed(lambda x: x, lambda number: (float(number),), steps=2, rounds=3, curve=2)
>>> found["losses"], sorted(found)
([0.0, 1.0], ['best_ms', 'losses', 'median_ms'])
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks.models import sizes
from benchmarks.models.problem import Problem

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
    taken = []
    for _ in range(1 + rounds):
        started = time.perf_counter()
        for _ in range(steps):
            loss = run(*next(batches))
        read(loss)
        taken.append((time.perf_counter() - started) / steps * 1e3)
    return {"losses": losses, "median_ms": statistics.median(taken[1:]), "best_ms": min(taken[1:])}


def options() -> argparse.Namespace:
    """What `launch` passes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workloads", nargs="+", choices=list(sizes.SIZES))
    parser.add_argument("--scale", choices=sizes.SCALES, default="quick")
    parser.add_argument("--steps", type=int, default=5)
    return parser.parse_args()


def report(train: Callable[[Problem, int], dict[str, Any]], given: argparse.Namespace) -> None:
    """Print what `train(problem, steps)` finds for every workload; a failure is a finding too."""
    for name in given.workloads:
        try:
            found = train(sizes.problem(name, given.scale), given.steps)
        except Exception as error:
            traceback.print_exc()
            said = str(error).strip() or "without a message"
            found = {"problem": f"{type(error).__name__}: {said.splitlines()[0][:200]}"}
        print(json.dumps({name: found}), flush=True)


def recording_rounds() -> int:
    """What `benchmarks.recording` passes to its peers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    return parser.parse_args().rounds
