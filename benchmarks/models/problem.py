"""A training problem in plain torch: model, loss, optimizer, batches, and how it is laid out.

Every contestant trains one of these; the hand-written JAX side is in `benchmarks.by_hand`.

>>> from benchmarks.models import mlp
>>> problem = mlp.problem(mlp.Size(width=8, hidden=16, batch=4))
>>> module = problem.module()
>>> loss = problem.step(module, problem.optimizer(module.parameters()), *problem.tensors(0))
>>> loss.shape, problem.spec("fc2.weight")
(torch.Size([]), (None, 'model'))
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

Spec = tuple[Any, ...]
"""One entry per axis: a mesh axis, a tuple of mesh axes, or None. Missing entries are None."""

MESH = {"data": 2, "model": 4}
"""The mesh of every benchmark: its axes and their sizes."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """What to train.

    Attributes:
        name: for tables and results.
        size: the extents it was made with, a dataclass.
        build: makes the module; called with a fixed seed.
        loss: `(module, *batch) -> loss`.
        optimizer: makes the optimizer of a module's parameters.
        max_norm: gradients are clipped to this global norm; None for no clipping.
        specs: ordered `(name pattern, spec)`; the first match holds, no match is replicated.
        batch_spec: how every array of a batch is split.
        batch: makes batch number `i` as NumPy arrays.
    """

    name: str
    size: Any
    build: Callable[[], torch.nn.Module]
    loss: Callable[..., torch.Tensor]
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
    max_norm: float | None
    specs: tuple[tuple[str, Spec], ...]
    batch_spec: Spec
    batch: Callable[[int], tuple[np.ndarray, ...]]

    def spec(self, name: str) -> Spec:
        """The spec of the parameter with this name."""
        return next((spec for pattern, spec in self.specs if fnmatch.fnmatch(name, pattern)), ())

    def module(self) -> torch.nn.Module:
        """The module with its initial parameters, the same at every call."""
        torch.manual_seed(0)
        return self.build()

    def tensors(self, number: int) -> tuple[torch.Tensor, ...]:
        """Batch `number` as CPU tensors."""
        return tuple(map(torch.from_numpy, self.batch(number)))

    def step(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, *batch: torch.Tensor
    ) -> torch.Tensor:
        """One training step as every torch user writes it; gradients are left in place."""
        optimizer.zero_grad()
        loss = self.loss(module, *batch)
        loss.backward()
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), self.max_norm)
        optimizer.step()
        return loss.detach()

    def described(self) -> dict[str, Any]:
        """The extents, for the results."""
        return dataclasses.asdict(self.size)
