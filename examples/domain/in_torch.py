"""Training in torch: a plain loop over a module written for one device, one program per step."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, Plan

from .place import Place
from .problems import Data, Problem
from .runs import Run, taken


def train(problem: Problem, data: Data, place: Place, steps: int | None = None) -> Run:
    """Train; arguments and result are those of `in_jax.train`."""
    steps = steps or problem.steps
    module = iso.shard(problem.initial(place.mesh), place.mesh, Plan({"*": P()}))
    optimizer = torch.optim.Adam(module.parameters(), lr=problem.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, problem.steps)

    @xs.compile
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(module(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = []
    for pair in data.batches(problem.batch, steps):
        x, y = (place.put(torch.from_numpy(part)) for part in pair)
        losses.append(step(x, y).item())
        schedule.step()

    def predict(fields: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return module(place.put(torch.from_numpy(fields))).cpu().numpy()

    return Run(losses, predict, taken(xs.memory_analysis(step)), xs.program_text(step))
