"""One problem, tried in both frameworks, on one device and on a mesh: memory, losses, rollout.

A budget that is stated has to be exceeded by one device and kept by each device of the mesh, and
the losses must be the same everywhere; `failures` says what was found.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

import isoshard as iso

from . import in_jax, in_torch
from .place import Place
from .problems import MIB, Data, Problem
from .runs import Run

TRAIN: dict[str, Callable[..., Run]] = {"jax": in_jax.train, "torch": in_torch.train}
TOLERANCE = 1e-4
"""Of losses, relative: sums are taken in another order on each mesh."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One training run.

    Attributes:
        framework: "jax" or "torch".
        place: the mesh, and how it cuts the field.
        run: what came of it.
        seconds: that it took, with compilation.
    """

    framework: str
    place: Place
    run: Run
    seconds: float

    @property
    def where(self) -> str:
        """How the field lies, in words."""
        if self.place.devices == 1:
            return "one device"
        split = self.place.sizes or f"{self.place.mesh.shape['space']} equal"
        return f"{self.place.devices} devices, shards {split}"

    def line(self, budget: int) -> str:
        """What it took, and how it began."""
        fits = "fits" if self.run.memory <= budget else "does not fit"
        losses = " ".join(f"{loss:.6f}" for loss in self.run.losses[:3])
        sent = ", ".join(f"{count} {kind}" for kind, count in self.run.collectives.items())
        return (
            f"  {self.framework:5} {self.where:33} {self.run.memory / MIB:6.2f} MiB {fits:12} "
            f"losses {losses}  {sent}"
        )


def meshes(devices: int = 8) -> tuple[Any, Any]:
    """A mesh of one device, and one of 2 by a half of the devices: batches by space."""
    names = ("data", "space")
    single = iso.make_mesh((1, 1), names, devices=jax.devices()[:1])
    return single, iso.make_mesh((2, devices // 2), names)


def trials(problem: Problem, data: Data, frameworks: list[str], short: int = 3) -> Iterator[Trial]:
    """Train on one device for a few steps, and on the mesh, in one cut of the field to the end.

    Args:
        problem: what is learned.
        data: of it.
        frameworks: some of "jax" and "torch".
        short: steps of the runs that only tell memory and first losses.

    Yields:
        The trials; the last of each framework is trained to the end.
    """
    single, many = meshes()
    for framework in frameworks:
        plans: list[tuple[Place, int | None]] = [(Place(single), short), (Place(many), None)]
        if problem.sizes:
            plans[1:] = [(Place(many), short), (Place(many, problem.sizes), None)]
        for place, steps in plans:
            started = time.perf_counter()
            run = TRAIN[framework](problem, data, place, steps)
            yield Trial(framework, place, run, time.perf_counter() - started)


def failures(trials: list[Trial], budget: int) -> list[str]:
    """What is not as it should be.

    Args:
        trials: of one problem.
        budget: bytes on each device.

    Returns:
        Faults; none if only the mesh fits and all losses are equal.
    """
    messages = []
    for trial in trials:
        fits = trial.run.memory <= budget
        if fits != (trial.place.devices > 1):
            messages.append(
                f"{trial.framework} on {trial.where} takes {trial.run.memory} bytes of {budget}"
            )
    reference = trials[0].run.losses
    for trial in trials[1:]:
        pairs = list(zip(reference, trial.run.losses, strict=False))
        if any(abs(a - b) > TOLERANCE * abs(a) for a, b in pairs):
            messages.append(f"{trial.framework} on {trial.where} has other losses: {pairs}")
    return messages
