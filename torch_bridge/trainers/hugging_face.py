"""`transformers.Trainer` on a mesh: a callback that shards the model by a `Plan`.

    import isoshard as iso
    from isoshard.torch_bridge.trainers.hugging_face import PlanCallback

    mesh = iso.make_mesh((2, 4), ("data", "model"))
    plan = iso.Plan.from_hf_tp_plan(model)           # or Plan.fsdp(..), or rules of your own
    trainer = Trainer(model, args, train_dataset=.., callbacks=[PlanCallback(mesh, plan)])
    trainer.train()                                  # with ACCELERATE_TORCH_DEVICE=jax

Everything else of the Trainer is as usual: evaluation, checkpoints, resuming, `save_pretrained`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from isoshard import core
from isoshard.core.errors import DeviceError
from isoshard.core.layout.mesh import as_mesh

from .batches import batch_axes, split_inputs


class PlanCallback(TrainerCallback):
    """Shards a Trainer's model over a mesh, and splits each batch.

    Args:
        mesh: a `jax.sharding.Mesh`, or another form of one.
        plan: of the parameters.
        data: the mesh axis, or several, that split the rows of a batch; None for none. By default
            "data", if the mesh has such an axis.

    Raises:
        SpecError: the mesh has no axis `data`.
        DeviceError: when the Trainer is created; it runs on another device.
        PlanError: likewise; the plan does not fit the model.

    Example:
        >>> import isoshard as iso
        >>> mesh = iso.make_mesh((2, 4), ("data", "model"))
        >>> callback = PlanCallback(mesh, iso.Plan.fsdp("model"))       # Trainer(callbacks=[..])
        >>> callback.data
        ('data',)
    """

    def __init__(self, mesh: Any, plan: Any, data: Any = "data"):
        """See the class."""
        self.mesh, self.plan = as_mesh(mesh), plan
        self.data = batch_axes(self.mesh, data)
        self._hook: Any = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any):
        """Shard the model, as soon as the Trainer has put it on its device."""
        if model is not None:
            self._shard(args, model)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any):
        """Shard a model that is created now (`model_init`)."""
        self._shard(args, model)

    def _shard(self, args: Any, model: torch.nn.Module) -> None:
        if args.device.type not in ("jax", "xla"):
            raise DeviceError(
                f"the Trainer runs on {args.device}, and a mesh needs the jax device; set "
                "ACCELERATE_TORCH_DEVICE=jax in the environment before it is created"
            )
        core.shard(model, self.mesh, self.plan)
        if self._hook is not None:
            self._hook.remove()
        self._hook = split_inputs(model, self.mesh, self.data)
