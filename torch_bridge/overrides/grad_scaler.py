"""`torch.amp.GradScaler("jax")`: the places where torch's class does not suit the device.

- `step` of an optimizer without `fused=True` reads on the host whether there was an infinity. That
  costs a wait outside `xs.compile`, and is refused inside, where a replay would not ask again.
- The scale is made when it is first used. If that is inside a step that is being captured, it is
  made as if before the step, so that it is there also after a step that was refused.

The methods are replaced once, when the device is registered; scalers of other devices run torch's
own.

>>> scaler = torch.amp.GradScaler("jax", init_scale=4.0)
>>> weight = torch.ones(2, device="jax", requires_grad=True)
>>> optimizer = torch.optim.SGD([weight], lr=1.0)
>>> scaler.scale(weight.sum()).backward()
>>> scaler.step(optimizer)
>>> scaler.update()
>>> weight.tolist(), scaler.get_scale()
([0.0, 0.0], 4.0)
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from isoshard.core.errors import CaptureError
from isoshard.core.runtime import metrics
from isoshard.torch_bridge._torch_internals.module_fields import (
    GROWTH,
    SCALE,
    SCALER_FIRST_USE,
    SCALER_STEP,
)
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.recorder import recorder
from isoshard.torch_bridge.engine.values.value import Aval, Storage, Value
from isoshard.torch_bridge.engine.values.views import Chain


def register() -> None:
    """Replace the methods."""
    SCALER_FIRST_USE.wrap(_first_use)
    SCALER_STEP.wrap(_step)


def _first_use(theirs: Any) -> Any:
    @functools.wraps(theirs)
    def first_use(self: Any, dev: torch.device) -> None:
        before = self.state_dict()
        theirs(self, dev)
        if recorder().capture is not None and isinstance(SCALE.of(self), lazy_tensor.LazyTensor):
            SCALE.put(self, _from_before(before["scale"], torch.float32))
            GROWTH.put(self, _from_before(before[GROWTH.attribute], torch.int32))

    return first_use


def _from_before(scalar: float, dtype: torch.dtype) -> torch.Tensor:
    """A number on the device that no recorded operation makes."""
    aval = Aval.contiguous((), dtype)
    storage = Storage(Value(np.array(scalar, aval.physical)), aval)
    return lazy_tensor.new_tensor(aval, storage, Chain.root(aval))


def _step(theirs: Any) -> Any:
    @functools.wraps(theirs)
    def step(
        self: Any,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if recorder().capture is not None and isinstance(
            SCALE.of(self, None), lazy_tensor.LazyTensor
        ):
            name = type(optimizer).__name__
            raise CaptureError(
                f"{metrics.user_location()}: GradScaler.step decides on the host whether to call "
                f"{name}.step, which a compiled step would not repeat. Create the optimizer with "
                "fused=True (Adam, AdamW, SGD, with torch 2.13 Adagrad), which decides on the "
                "device; with torch.bfloat16 no GradScaler is needed; or call the scaler outside "
                "the compiled step."
            )
        return theirs(self, optimizer, state, *args, **kwargs)

    return step
