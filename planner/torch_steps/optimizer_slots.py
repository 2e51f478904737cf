"""State that an optimizer initializes in its first step, initialized before the step is planned.

What is planned is a step like all later ones, which finds that state. So the optimizer takes a step
of its own first, with gradients without elements, on a tape that is dropped; the state is then
memory like that of the parameters, named `exp_avg.layers.0.weight`, with the same sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from isoshard.torch_bridge.kit import Value, lazy_tensor, sharding_ids

from .placeholder_tensors import PlaceholderTensors
from .planned_recording import PlannedRecording
from .planning_tape import ShapeOnly
from .step_models import Named

Record = Callable[[Callable[..., Any]], PlannedRecording]
"""Makes the recording of a function that takes nothing."""


def make_slots(
    optimizers: Sequence[torch.optim.Optimizer],
    record: Record,
    placeholders: PlaceholderTensors,
) -> None:
    """Initialize the state of optimizers by a step of their own.

    An optimizer whose `step` needs more than gradients is left as it is: `keep_slots` after the
    step finds its state.
    """
    for optimizer in optimizers:
        parameters = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and isinstance(parameter, lazy_tensor.LazyTensor)
        ]
        if not parameters or all(optimizer.state.get(parameter) for parameter in parameters):
            continue
        recording = record(optimizer.step)
        before = [(parameter, parameter.grad) for parameter in parameters]
        groups = [dict(group) for group in optimizer.param_groups]
        states = {parameter: dict(state) for parameter, state in optimizer.state.items()}
        try:
            for parameter in parameters:
                named = placeholders.names[id(parameter._storage)]
                with torch.no_grad():
                    parameter.grad = placeholders.placeholder(parameter.detach(), named)
            recording.run((), {})
            keep_slots([optimizer], recording, placeholders.names, placeholders)
        except Exception:
            optimizer.state.clear()
            optimizer.state.update(states)
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
    placeholders: PlaceholderTensors,
) -> bool:
    """Turn state that was initialized in a recording into memory from before it.

    Returns:
        Whether there was any: then the step is to be recorded again.
    """
    initialized = False
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            owner = names.get(id(getattr(parameter, "_storage", None)))
            for kind, slot in state.items():
                if not isinstance(slot, lazy_tensor.LazyTensor) or slot._chain.ops:
                    continue
                storage = slot._storage
                if recording.existed_before(slot) or storage.value.tape is not recording.tape:
                    continue
                named = placeholders.of_state(kind, slot, parameter, owner)
                placeholders.names[id(storage)] = named
                size, dtype = storage.aval.token
                value = Value(ShapeOnly(size, dtype), sharding_ids.intern(named.layout))
                value.memory = storage.id
                storage.value, storage.annotation = value, named.layout
                initialized = True
    return initialized
