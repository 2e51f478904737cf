"""Optimizer state with a sharding of its own, or in the memory of the host, by rules of a plan.

The state of a torch optimizer is made in its first step, and is sharded as its parameters. Rules of
a plan that match slots and no parameter shard some of it otherwise (ZeRO-1), and `memory=` stores
it elsewhere; a step fetches that after the backward pass, and stores it again.

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
shape is stored sharded as the parameter, one of another shape (a factored second moment) as it is;
a single number, such as a count of steps, remains in the devices' memory.

>>> zero = iso.Plan({"*.exp_avg*": ("x",), "*": None})
>>> model = iso.shard(torch.nn.Linear(8, 8), mesh, iso.P())
>>> adam = torch.optim.Adam(model.parameters())
>>> _ = iso.shard(adam, mesh, zero)
>>> model(torch.ones(8, device="jax")).sum().backward(); adam.step()
>>> [iso.sharding_of(x).spec for x in (adam.state[model.weight]["exp_avg"], model.weight)]
[P('x',), P()]
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
from isoshard.core.plan.model_leaves import ModelLeaf, leaves_of
from isoshard.core.plan.rule_patterns import slot_rules
from isoshard.core.plan.slot_rules import slot_layouts
from isoshard.core.plan.unused_rules import UnusedRuleWarning
from isoshard.core.runtime.user_warnings import warn_user
from isoshard.torch_bridge.common.argument_types import MeshLike, PlanLike
from isoshard.torch_bridge.dtensor.dtensor_modules import named_params
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.recorder import materialize, recorder

from ..layout import marks

_Slot = tuple[str, torch.Tensor, lazy_tensor.LazyTensor]


def shards_state(plan: PlanLike, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a plan may decide how the optimizer's state is sharded, or where it is stored."""
    if not isinstance(plan, Plan):
        return False
    names = list(named_params(optimizer))
    return any(factor.memory or slot_rules(factor, names) for factor in plan.factors)


def shard_state(
    optimizer: torch.optim.Optimizer, mesh: MeshLike, plan: Plan
) -> torch.optim.Optimizer:
    """Shard the state of an optimizer, present and future, by a plan.

    Args:
        optimizer: of parameters on the mesh.
        mesh: the mesh.
        plan: a `Plan` with `memory`, or with rules that match slots; others are for parameters.

    Raises:
        ShardingError: a parameter is on no mesh, or the devices have no such memory; at a step, a
            slot with a memory rule is on no mesh.
        PlanError: a memory rule matches no slot, or a rule does not fit one; of an optimizer
            without state, at its first step.
    """
    outside = [name for name, param in named_params(optimizer).items() if _layout(param) is None]
    if outside:
        raise ShardingError(
            f"parameters {', '.join(outside)} of the optimizer are on no mesh; shard the model "
            "first: iso.shard(model, mesh, plan)."
        )
    for factor in plan.factors:
        for pattern, kind in factor.memory:
            check_memory(mesh, kind, name=f"memory rule {pattern!r}")
    mark_state = _StateMarker(plan, mesh)
    if optimizer.state:
        mark_state(optimizer)
    optimizer.register_step_post_hook(mark_state)
    return optimizer


class _StateMarker:
    """A hook after each step: marks new slots with their sharding and memory."""

    def __init__(self, plan: Plan, mesh: MeshLike):
        self._plan = plan
        self._mesh = mesh
        self._checked = False
        self._names: tuple[str, ...] = ()
        self._ruled: dict[str, jax.sharding.NamedSharding] = {}

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        slots = list(_slots(optimizer))
        if not self._checked and optimizer.state:
            names = [*named_params(optimizer), *(name for name, *_ in slots)]
            check_used((factor.memory for factor in self._plan.factors), names)
            self._checked = True
        if self._names != tuple(name for name, *_ in slots):
            self._ruled = self._layouts(optimizer, slots)
            self._names = tuple(name for name, *_ in slots)
        moves = []  # all are looked at before the first is moved
        for name, param, slot in slots:
            kind, layout = self._plan.memory_for(name), self._ruled.get(name)
            if kind is None and layout is None:
                continue
            if layout is None:
                layout = _layout(param) if slot.shape == param.shape else _computed_layout(slot)
            if layout is None:
                raise ShardingError(f"{name}: {_NOWHERE}")
            target = in_memory(layout, kind, name=name)
            if slot._storage.annotation != target:
                moves.append((slot, target))
        for slot, target in moves:
            marks.annotate(slot, target)

    def _layouts(
        self, optimizer: torch.optim.Optimizer, slots: list[_Slot]
    ) -> dict[str, jax.sharding.NamedSharding]:
        """The shardings by rules for slots; warns of a plan with neither those nor `memory`."""
        params = {id(param): _leaf(name, param) for name, param in named_params(optimizer).items()}
        owners = {
            _leaf(name, slot): params[id(param)] if slot.shape == param.shape else None
            for name, param, slot in slots
            if slot.ndim
        }
        layouts = slot_layouts(self._plan, owners, list(params.values()), self._mesh)
        if not layouts and not any(factor.memory for factor in self._plan.factors):
            names = ", ".join([name for name, *_ in slots][:3])
            warn_user(
                f"the plan has no rule for the state of {type(optimizer).__name__}, which is "
                f"sharded as its parameters: its slots are {names or 'none'}. Name slots, such as "
                'Plan({"*.exp_avg*": P("data")}), or leave iso.shard(optimizer, ..) out.',
                UnusedRuleWarning,
            )
        return layouts


_NOWHERE = (
    "a memory rule of the plan names this slot, and it is on no mesh (it is a view, or was made "
    "elsewhere). Shard it first, iso.shard(slot, mesh, spec), or leave it out of memory=."
)


def _slots(optimizer: torch.optim.Optimizer) -> Iterator[_Slot]:
    """The slots that can be stored elsewhere: no numbers, unless the parameter is one."""
    for name, param in named_params(optimizer).items():
        for kind, slot in optimizer.state.get(param, {}).items():
            if isinstance(slot, lazy_tensor.LazyTensor) and (slot.ndim or not param.ndim):
                yield f"state.{name}.{kind}", param, slot


def _leaf(name: str, tensor: torch.Tensor) -> ModelLeaf:
    return leaves_of({name: tensor})[0]


def _computed_layout(slot: lazy_tensor.LazyTensor) -> jax.sharding.NamedSharding | None:
    """The sharding of a slot; of one that is only recorded the one that the compiler chooses."""
    layout = _layout(slot)
    if layout is None and not slot._chain.ops and recorder().capture is None:
        materialize([slot._storage.value])
        layout = _layout(slot)
    return layout


def _layout(tensor: torch.Tensor) -> jax.sharding.NamedSharding | None:
    return marks.placed(tensor) if isinstance(tensor, lazy_tensor.LazyTensor) else None
