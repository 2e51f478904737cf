"""The two fields that are learned, at two sizes each, and what each device may hold.

>>> problem = problems(quick=True)["flow"]
>>> problem.grid, problem.budget // 2**20
((32, 32), 4)
>>> data = Data.simulate(problem, trajectories=3, snapshots=4, held_out=1)
>>> data.before.shape, data.held_out.shape
((6, 1, 32, 32), (1, 4, 1, 32, 32))
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import torch

from . import flow, phases
from .transformer import Transformer, transformer
from .unet import UNet, unet

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Problem:
    """A field, and the network that learns it.

    Attributes:
        name: of the field.
        grid: points along each side.
        simulate: of a random generator, and the numbers of trajectories and snapshots.
        module: the network in torch, for a mesh or None.
        function: the network in JAX, of parameters, field and place.
        sizes: shards of the first side that are not equal; None where only equal ones are taken.
        budget: bytes that the training step may take on each device.
        batch: fields in a step.
        steps: of training.
        rate: of learning, at its highest.
    """

    name: str
    grid: tuple[int, ...]
    simulate: Callable[[np.random.Generator, int, int], np.ndarray]
    module: Callable[[Any], torch.nn.Module]
    function: Callable[..., Any]
    sizes: tuple[int, ...] | None
    budget: int
    batch: int
    steps: int
    rate: float

    def initial(self, mesh: jax.sharding.Mesh | None = None) -> torch.nn.Module:
        """The network with its first parameters, always the same."""
        torch.manual_seed(0)
        return self.module(mesh)


@dataclasses.dataclass(frozen=True)
class Data:
    """What the solver gave.

    Attributes:
        before: [pairs, 1, *grid], fields.
        after: the same one interval later.
        held_out: [trajectories, snapshots, 1, *grid], not among the pairs.
    """

    before: np.ndarray
    after: np.ndarray
    held_out: np.ndarray

    @classmethod
    def simulate(cls, problem: Problem, trajectories: int, snapshots: int, held_out: int) -> Data:
        """Let the solver run; the last trajectories are held out."""
        fields = problem.simulate(np.random.default_rng(0), trajectories, snapshots)
        shown = fields[:-held_out]
        shape = (-1, 1, *problem.grid)
        return cls(shown[:, :-1].reshape(shape), shown[:, 1:].reshape(shape), fields[-held_out:])

    def batches(self, size: int, steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Random batches of pairs, always the same ones."""
        rng = np.random.default_rng(1)
        for _ in range(steps):
            chosen = rng.choice(len(self.before), size, replace=False)
            yield self.before[chosen], self.after[chosen]


def problems(*, quick: bool) -> dict[str, Problem]:
    """The flow in a box, for a U-Net, and the two phases, for a transformer.

    Args:
        quick: whether they shall be small enough for a test.

    Returns:
        By name.
    """
    side, width, layers = (32, 8, 1) if quick else (48, 16, 3)
    sizes = (12, 4, 8, 8) if quick else (16, 4, 20, 8)
    block = (16, 8, 8) if quick else (32, 16, 16)
    wide, heads = (16, 2) if quick else (64, 4)
    return {
        "flow": Problem(
            name="flow",
            grid=(side, side),
            simulate=lambda rng, count, snapshots: flow.simulate(rng, count, side, snapshots),
            module=lambda mesh: UNet(width),
            function=unet,
            sizes=sizes,
            budget=(4 if quick else 16) * MIB,
            batch=8,
            steps=20 if quick else 240,
            rate=1e-3,
        ),
        "phases": Problem(
            name="phases",
            grid=block,
            simulate=lambda rng, count, snapshots: phases.simulate(rng, count, block, snapshots),
            module=functools.partial(Transformer, block, wide, heads, layers),
            function=functools.partial(transformer, heads=heads),
            sizes=None,
            budget=3 * MIB // 8 if quick else 16 * MIB,
            batch=8,
            steps=10 if quick else 120,
            rate=1e-3,
        ),
    }
