"""A hand-written training step, laid out over a mesh.

>>> from benchmarks.by_hand import models
>>> from benchmarks.models import sizes
>>> work = models.by_hand(sizes.problem("mlp", "quick"))
>>> training = Training(work, make_mesh((1, 1)))
>>> first, second = (float(training.run(*training.batch(0))) for _ in range(2))
>>> second < first
True
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.models.problem import MESH, Problem

Params = dict[str, jax.Array]
State = dict[str, Any]


def make_mesh(shape: tuple[int, ...] = tuple(MESH.values())) -> Mesh:
    """The mesh of all benchmarks: `shape` devices over the axes "data" and "model"."""
    return jax.make_mesh(shape, tuple(MESH), axis_types=(AxisType.Auto,) * 2)


def same(name: str, array: np.ndarray) -> np.ndarray:
    """Arrays are stored as torch stores them."""
    return array


@dataclasses.dataclass(frozen=True)
class ByHand:
    """The JAX side of a problem.

    Attributes:
        problem: what it is the same as.
        loss: `(params, buffers, *batch) -> loss, buffers`.
        init: `params -> state` of the optimizer.
        update: `(params, grads, state) -> params, state`, clipping included.
        stored: `(name, array) -> array` as this side keeps it: parameters by their names in torch,
            arrays of a batch under the name "batch".
        buffers: names, as patterns of their last part, of the buffers that the step updates.
    """

    problem: Problem
    loss: Callable[..., tuple[jax.Array, Params]]
    init: Callable[[Params], State]
    update: Callable[[Params, Params, State], tuple[Params, State]]
    stored: Callable[[str, np.ndarray], np.ndarray] = same
    buffers: tuple[str, ...] = ()

    def arrays(self, module: torch.nn.Module) -> tuple[dict[str, np.ndarray], ...]:
        """Copies of the module's parameters and buffers, stored this side's way."""
        params = {name: p.detach().numpy() for name, p in module.named_parameters()}
        buffers = {
            name: b.numpy()
            for name, b in module.named_buffers()
            if name.rpartition(".")[2] in self.buffers
        }
        return tuple(
            {name: np.array(self.stored(name, array)) for name, array in part.items()}
            for part in (params, buffers)
        )

    def step(
        self, params: Params, state: State, buffers: Params, *batch: jax.Array
    ) -> tuple[Params, State, Params, jax.Array]:
        """One training step."""
        (loss, buffers), grads = jax.value_and_grad(self.loss, has_aux=True)(
            params, buffers, *batch
        )
        params, state = self.update(params, grads, state)
        return params, state, buffers, loss


class Training:
    """A jitted step with the arrays that it carries on.

    Args:
        work: what to train.
        mesh: where.

    Attributes:
        compiled: XLA's executable.
    """

    def __init__(self, work: ByHand, mesh: Mesh):
        """Compile the step and lay everything out."""
        self.work = work
        self.mesh = mesh
        params, buffers = work.arrays(work.problem.module())
        placed = {name: self._named(work.problem.spec(name)) for name in params}
        replicated = self._named(())
        state_shardings = {
            name: placed if isinstance(part, dict) else replicated
            for name, part in work.init({}).items()
        }
        shardings = (placed, state_shardings, dict.fromkeys(buffers, replicated))
        params = jax.device_put(params, placed)
        self.state = (
            params,
            jax.device_put(work.init(params), state_shardings),
            jax.device_put(buffers, shardings[2]),
        )
        self.step = jax.jit(
            work.step, donate_argnums=(0, 1, 2), out_shardings=(*shardings, replicated)
        )
        self.compiled = self.step.lower(*self.state, *self.batch(0)).compile()

    def run(self, *batch: jax.Array) -> jax.Array:
        """Train one step; returns the loss, which need not be there yet."""
        *state, loss = self.step(*self.state, *batch)
        self.state = tuple(state)
        return loss

    def batch(self, number: int) -> tuple[jax.Array, ...]:
        """Batch `number` on the devices; int64 becomes int32, JAX's default."""
        sharding = self._named(self.work.problem.batch_spec)
        return tuple(
            jax.device_put(
                self.work.stored("batch", x.astype(np.int32) if x.dtype == np.int64 else x),
                sharding,
            )
            for x in self.work.problem.batch(number)
        )

    def _named(self, spec: tuple[Any, ...]) -> NamedSharding:
        return NamedSharding(self.mesh, P(*spec))
