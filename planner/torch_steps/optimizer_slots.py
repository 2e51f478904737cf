"""State that the first step of an optimizer makes, made before the step is planned.

What is planned is a step like all later ones, which finds that state. So the optimizer takes a step
of its own first, with gradients without elements, on a tape that is thrown away; what it made is
then memory like that of the parameters, named `exp_avg.layers.0.weight`, and laid out alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from isoshard.torch_bridge.kit import Value, layout_numbers, lazy_tensor

from .found_models import Named
from .planned_recording import PlannedRecording
from .planning_tape import ShapeOnly
from .stand_ins import StandIns
from .user_lines import UserLines

Record = Callable[[Callable[..., Any]], PlannedRecording]
"""Makes the recording of a function that takes nothing."""


def make_slots(
    optimizers: Sequence[torch.optim.Optimizer],
    record: Record,
    stand_ins: StandIns,
    user: UserLines,
) -> None:
    """Let optimizers have the state that their first step makes.

    An optimizer whose `step` wants more than gradients is left as it is: `keep_slots` after the
    step finds what it made.
    """
    for optimizer in optimizers:
        parameters = [
            device
            for group in optimizer.param_groups
            for device in group["params"]
            if device.requires_grad and isinstance(device, lazy_tensor.LazyTensor)
        ]
        if not parameters or all(optimizer.state.get(parameter) for parameter in parameters):
            continue
        recording = record(optimizer.step)
        before = [(parameter, parameter.grad) for parameter in parameters]
        groups = [dict(group) for group in optimizer.param_groups]
        had = {parameter: dict(state) for parameter, state in optimizer.state.items()}
        try:
            for parameter in parameters:
                named = stand_ins.names[id(parameter._storage)]
                with torch.no_grad():
                    parameter.grad = stand_ins.made(parameter.detach(), named)
            recording.run((), {})
            keep_slots([optimizer], recording, stand_ins.names, stand_ins, user)
        except Exception:
            optimizer.state.clear()
            optimizer.state.update(had)
        finally:
            recording.undo()
            recording.forget()
            for parameter, gradient in before:
                parameter.grad = gradient
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(values)


def keep_slots(
    optimizers: Sequence[torch.optim.Optimizer],
    recording: PlannedRecording,
    names: Mapping[int, Named],
    stand_ins: StandIns,
    user: UserLines,
) -> bool:
    """Let the state that optimizers made in a recording be memory from before it."""
    result = False
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            owner = names.get(id(getattr(parameter, "_storage", None)))
            for kind, slot in state.items():
                if not isinstance(slot, lazy_tensor.LazyTensor) or slot._chain.ops:
                    continue
                storage = slot._storage
                if recording.existed_before(slot) or storage.value.tape is not recording.tape:
                    continue
                named = stand_ins.of_state(kind, slot, parameter, owner)
                stand_ins.names[id(storage)] = named
                size, dtype = storage.aval.token
                value = Value(ShapeOnly(size, dtype, user), layout_numbers.intern(named.layout))
                value.memory = storage.id
                storage.value, storage.annotation = value, named.layout
                result = True
    return result
