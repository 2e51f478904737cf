"""Lightning on a mesh: a strategy that shards the model by a `Plan`.

    import isoshard as iso
    from isoshard.torch_bridge.trainers.lightning_plan import plan_strategy

    mesh = iso.make_mesh((2, 4), ("data", "model"))
    strategy = plan_strategy(mesh, iso.Plan.fsdp("model"))
    Trainer(accelerator="jax", strategy=strategy).fit(module, loader)

Fabric takes the same with `package="lightning.fabric"`.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from isoshard import core
from isoshard.core.layout.mesh import as_mesh

from .batches import batch_axes, split_batch, split_inputs


def plan_strategy(
    mesh: Any, plan: Any, data: Any = "data", *, package: str = "lightning.pytorch"
) -> Any:
    """A Lightning strategy that shards a module over a mesh, and splits each batch.

    Args:
        mesh: a `jax.sharding.Mesh`, or another form of one.
        plan: of the parameters.
        data: the mesh axis, or several, that split the rows of a batch; None for none. By default
            "data", if the mesh has such an axis.
        package: `lightning.pytorch`, `lightning.fabric`, or either's name as a package of its own.

    Raises:
        SpecError: the mesh has no axis `data`.

    Returns:
        What `Trainer(strategy=..)` or `Fabric(strategy=..)` takes.
    """
    strategies = importlib.import_module(f"{package}.strategies")
    jax_mesh = as_mesh(mesh)
    return _strategy_of(strategies.SingleDeviceStrategy, jax_mesh, plan, batch_axes(jax_mesh, data))


def _strategy_of(parent: Any, mesh: Any, plan: Any, data: Any) -> Any:
    class PlanStrategy(parent):
        """The `jax` device, with the module sharded over a mesh."""

        def model_to_device(self) -> None:
            """Move the module, and shard it."""
            core.shard(self.model, mesh, plan)

        def module_to_device(self, module: torch.nn.Module) -> None:
            """Move a module of Fabric, shard it, and split its inputs."""
            core.shard(module, mesh, plan)
            split_inputs(module, mesh, data)

        def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            """Move a batch, and split its rows."""
            moved = parent.batch_to_device(self, batch, *args, **kwargs)
            return split_batch(moved, mesh, data)

    return PlanStrategy(device=torch.device("jax", 0))
