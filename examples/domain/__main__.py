"""Train both networks in both frameworks: `python -m examples.domain --pictures out`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import isoshard as iso

from . import pictures
from .problems import MIB, Data, Problem, problems
from .runs import errors
from .trials import TRAIN, Trial, failures, trials

TRAJECTORIES, SNAPSHOTS, HELD_OUT = 24, 9, 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example.

    Args:
        arguments: the command line; None reads it from `sys.argv`.

    Returns:
        0; 1 if the mesh does not keep the budget, or losses differ.
    """
    parser = argparse.ArgumentParser(prog="python -m examples.domain", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small fields, few steps")
    parser.add_argument("--framework", choices=list(TRAIN), help="only this one")
    parser.add_argument("--problem", choices=list(problems(quick=True)), help="only this one")
    parser.add_argument("--pictures", type=Path, help="a folder for pictures of the fields")
    options = parser.parse_args(arguments)
    frameworks = [options.framework] if options.framework else list(TRAIN)
    failures = []
    for name, problem in problems(quick=options.quick).items():
        if options.problem in (None, name):
            failures += _run(problem, frameworks, options.pictures)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def _run(problem: Problem, frameworks: list[str], folder: Path | None) -> list[str]:
    """Train one network in all ways, and say how it went."""
    started = time.perf_counter()
    data = Data.simulate(problem, TRAJECTORIES, SNAPSHOTS, HELD_OUT)
    print(
        f"{problem.name}: {' x '.join(map(str, problem.grid))} points, {TRAJECTORIES} trajectories "
        f"solved in {time.perf_counter() - started:.0f} s; "
        f"budget {problem.budget / MIB:g} MiB on each device",
        flush=True,
    )
    trials_run = []
    for trial in trials(problem, data, frameworks):
        print(trial.line(problem.budget), flush=True)
        trials_run.append(trial)
    trained = [trial for trial in trials_run if len(trial.run.losses) == problem.steps]
    steps = SNAPSHOTS - 1
    still = np.repeat(data.held_out[:, :1], SNAPSHOTS, 1)
    rollouts = {"the solver": data.held_out}
    for trial in trained:
        first, last = trial.run.losses[0], np.mean(trial.run.losses[-10:])
        print(
            f"  {trial.framework}: loss {first:.4f} -> {last:.4f} "
            f"in {problem.steps} steps, {trial.seconds:.0f} s"
        )
        rollouts[trial.framework] = trial.run.rollout(data.held_out[:, 0], steps)
    print(f"  error on held-out fields after 1 .. {steps} intervals, as a share of the field:")
    for name, fields in ({**rollouts, "no change": still}).items():
        if name != "the solver":
            print(f"    {name:9} {_formatted(errors(fields, data.held_out)[1:])}")
    if folder is not None:
        _draw(problem, rollouts, trained, folder)
    return failures(trials_run, problem.budget)


def _draw(
    problem: Problem, rollouts: dict[str, np.ndarray], trained: list[Trial], folder: Path
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shards = trained[0].place.mesh.shape["space"]
    sizes = trained[0].place.sizes or (problem.grid[0] // shards,) * shards
    times = [0, 1, 2, 4, 8]
    drawn = {name: fields[0] for name, fields in rollouts.items()}
    for name, figure in {
        "fields": pictures.fields(drawn, times, sizes),
        "losses": pictures.curves({trial.framework: trial.run.losses for trial in trained}),
    }.items():
        path = folder / f"domain_{problem.name}_{name}.png"
        figure.savefig(path, dpi=90)
        print(f"  {path}")


def _formatted(numbers: list[float]) -> str:
    return " ".join(f"{number:.3f}" for number in numbers)


if __name__ == "__main__":
    iso.simulate_devices(8)
    sys.exit(main())
