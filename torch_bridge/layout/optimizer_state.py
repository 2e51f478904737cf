"""Optimizer state that rests in the memory of the host, by the `memory=` of a plan.

The state of a torch optimizer is made in its first step, and lies as its parameters do. A plan can
say that some of it rests elsewhere; a step brings it in after the backward pass, and puts it back.

>>> import isoshard as iso, isoshard.torch_bridge as xs
>>> mesh = jax.make_mesh((8,), ("x",))
>>> plan = iso.Plan({"*": ("x",)}, memory={"*.exp_avg*": "pinned_host"})
>>> model = iso.shard(torch.nn.Linear(8, 8), mesh, plan)
>>> adam = torch.optim.Adam(model.named_parameters())
>>> _ = iso.shard(adam, mesh, plan)
>>> model(torch.ones(8, device="jax")).sum().backward(); adam.step()
>>> iso.sharding_of(adam.state[model.weight]["exp_avg"]).memory_kind
'pinned_host'

Slots are called `state.<parameter>.<slot>`, as in a checkpoint: parameters go by name if the
optimizer was made with `model.named_parameters()`, else by position. A slot of its parameter's
shape rests laid out as the parameter, one of another shape (a factored second moment) as it lies;
a single number, such as a count of steps, stays where devices compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import torch

from isoshard.core.errors import ShardingError
from isoshard.core.layout.offload import check_memory, in_memory
from isoshard.core.plan import Plan
from isoshard.core.plan.memory_rules import check_used
from isoshard.torch_bridge.argument_types import MeshLike, PlanLike
from isoshard.torch_bridge.dtensor.dtensor_modules import named_params
from isoshard.torch_bridge.engine.recording import lazy_tensor

from . import marks


def says_memory(plan: PlanLike) -> bool:
    """Whether a plan says of anything where it rests."""
    return isinstance(plan, Plan) and any(factor.memory for factor in plan.factors)


def shard_state(
    optimizer: torch.optim.Optimizer, mesh: MeshLike, plan: Plan
) -> torch.optim.Optimizer:
    """Let the state of an optimizer, what there is and what it will make, rest as a plan says.

    Args:
        optimizer: of parameters that lie on the mesh.
        mesh: the mesh.
        plan: a `Plan` with `memory`; its specs are those of the parameters.

    Returns:
        The optimizer.

    Raises:
        ShardingError: a parameter lies on no mesh, or the devices have no such memory; at a step, a
            slot with a memory rule lies on no mesh.
        PlanError: a memory rule matches no slot; of an optimizer without state, at its first step.
    """
    outside = [name for name, param in named_params(optimizer).items() if _layout(param) is None]
    if outside:
        raise ShardingError(
            f"parameters {', '.join(outside)} of the optimizer lie on no mesh; lay the model out "
            "first: iso.shard(model, mesh, plan)."
        )
    for factor in plan.factors:
        for pattern, kind in factor.memory:
            check_memory(mesh, kind, name=f"memory rule {pattern!r}")
    rests = _Rests(plan)
    if optimizer.state:
        rests(optimizer)
    optimizer.register_step_post_hook(rests)
    return optimizer


class _Rests:
    """After a step: slots that are new are marked with the memory in which they rest."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._checked = False

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        slots = list(_slots(optimizer))
        if not self._checked and optimizer.state:
            names = [*named_params(optimizer), *(name for name, *_ in slots)]
            check_used((factor.memory for factor in self._plan.factors), names)
            self._checked = True
        moves = []  # all are looked at before the first is moved
        for name, param, slot in slots:
            kind = self._plan.memory_for(name)
            if kind is None:
                continue
            layout = _layout(param) if slot.shape == param.shape else _layout(slot)
            if layout is None:
                raise ShardingError(f"{name}: {_NOWHERE}")
            wanted = in_memory(layout, kind, name=name)
            if slot._storage.annotation != wanted:
                moves.append((slot, wanted))
        for slot, wanted in moves:
            marks.annotate(slot, wanted)


_NOWHERE = (
    "a memory rule of the plan names this slot, and it lies on no mesh (it is a view, or was made "
    "elsewhere). Lay it out first, iso.shard(slot, mesh, spec), or leave it out of memory=."
)


def _slots(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[str, torch.Tensor, lazy_tensor.LazyTensor]]:
    """The slots that can rest: no numbers, unless the parameter is one."""
    for name, param in named_params(optimizer).items():
        for kind, slot in optimizer.state.get(param, {}).items():
            if isinstance(slot, lazy_tensor.LazyTensor) and (slot.ndim or not param.ndim):
                yield f"state.{name}.{kind}", param, slot


def _layout(tensor: torch.Tensor) -> jax.sharding.NamedSharding | None:
    return marks.placed(tensor) if isinstance(tensor, lazy_tensor.LazyTensor) else None
