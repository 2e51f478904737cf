"""A workload: one training problem, written once in torch and once in JAX.

The two sides share names, shapes and specs, so that whatever they differ in is the framework:

>>> import jax
>>> from benchmarks import mlp
>>> mesh = make_mesh((1, 1))
>>> mlp.WORKLOAD.spec("fc1.weight"), mlp.WORKLOAD.spec("fc2.bias")
(P('model', None), P())
>>> params = mlp.WORKLOAD.jax_params(mlp.WORKLOAD.torch_module(), mesh)
>>> params["fc1.weight"].shape
(2048, 512)

The hand-written side is what a JAX user would write: a dict of parameters, one jitted step with
`out_shardings` for what it returns and donation for what it replaces.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Params = dict[str, jax.Array]
State = dict[str, Any]


def make_mesh(shape: tuple[int, int] = (2, 4)) -> Mesh:
    """The mesh of all benchmarks: `shape` devices over the axes "data" and "model"."""
    return jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, its loss and optimizer in both frameworks, and how it is laid out.

    Attributes:
        name: for tables and file names.
        build: makes the torch module; called with a fixed seed.
        torch_loss: `(module, *batch) -> loss`.
        torch_optimizer: makes the optimizer of a module's parameters.
        max_norm: gradients are clipped to this global norm; None for no clipping.
        jax_loss: `(params, *batch) -> loss`, the same in JAX.
        jax_init: `params -> state` of the optimizer.
        jax_update: `(params, grads, state) -> params, state`, clipping included.
        specs: ordered `(name pattern, spec)`; the first match holds, no match is replicated.
        batch: makes batch number `i` as numpy arrays, each split over "data" along its first axis.
    """

    name: str
    build: Callable[[], torch.nn.Module]
    torch_loss: Callable[..., torch.Tensor]
    torch_optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
    max_norm: float | None
    jax_loss: Callable[..., jax.Array]
    jax_init: Callable[[Params], State]
    jax_update: Callable[[Params, Params, State], tuple[Params, State]]
    specs: tuple[tuple[str, P], ...]
    batch: Callable[[int], tuple[np.ndarray, ...]]

    def spec(self, name: str) -> P:
        """The spec of the parameter with this name."""
        return next((spec for pattern, spec in self.specs if fnmatch.fnmatch(name, pattern)), P())

    def torch_module(self) -> torch.nn.Module:
        """The module with its initial parameters, the same at every call."""
        torch.manual_seed(0)
        return self.build()

    def torch_step(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, *batch: torch.Tensor
    ) -> torch.Tensor:
        """One training step as every torch user writes it; gradients are left in place."""
        optimizer.zero_grad()
        loss = self.torch_loss(module, *batch)
        loss.backward()
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), self.max_norm)
        optimizer.step()
        return loss.detach()

    def jax_params(self, module: torch.nn.Module, mesh: Mesh) -> Params:
        """Copies of the module's parameters, laid out over `mesh`."""
        return {
            name: jax.device_put(
                np.array(parameter.detach().numpy()), NamedSharding(mesh, self.spec(name))
            )
            for name, parameter in module.named_parameters()
        }

    def jax_batch(self, number: int, mesh: Mesh) -> tuple[jax.Array, ...]:
        """Batch `number`, split over the "data" axis; int64 becomes int32, JAX's default."""
        sharding = NamedSharding(mesh, P("data"))
        return tuple(
            jax.device_put(x.astype(np.int32) if x.dtype == np.int64 else x, sharding)
            for x in self.batch(number)
        )

    def jax_state(self, params: Params, mesh: Mesh) -> State:
        """The optimizer's initial state, laid out like the parameters."""
        return jax.device_put(self.jax_init(params), self._jax_shardings(mesh)[1])

    def jax_step(self, mesh: Mesh) -> Callable[..., tuple[Params, State, jax.Array]]:
        """The hand-written step `(params, state, *batch) -> params, state, loss`, jitted."""

        def step(params: Params, state: State, *batch: jax.Array):
            loss, grads = jax.value_and_grad(self.jax_loss)(params, *batch)
            params, state = self.jax_update(params, grads, state)
            return params, state, loss

        shardings = (*self._jax_shardings(mesh), NamedSharding(mesh, P()))
        return jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings)

    def _jax_shardings(self, mesh: Mesh) -> tuple[dict[str, Any], dict[str, Any]]:
        """Shardings of the parameters and of the optimizer's state, which is laid out alike."""
        names = [name for name, _ in self.torch_module().named_parameters()]
        params = {name: NamedSharding(mesh, self.spec(name)) for name in names}
        state = {
            name: params if isinstance(part, dict) else NamedSharding(mesh, P())
            for name, part in self.jax_init({}).items()
        }
        return params, state
