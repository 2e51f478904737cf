"""`torch.amp.GradScaler("jax")`: the places where torch's class does not suit the device.

- `unscale_` takes the reciprocal of the scale in float64. JAX has no float64 unless
  `jax_enable_x64` is on, so the reciprocal is taken in float32 then, where it is exact for the
  powers of two that scales are.
- `step` of an optimizer without `fused=True` asks on the host whether an infinity was found. That
  costs a wait outside `xs.compile`, and is refused inside, where a replay would not ask again.
- The scale is made when it is first used. If that is inside a step that is being captured, it is
  made as if before the step, so that it is there also after a step that was refused.

The methods are replaced once, when the device is registered; scalers of other devices run torch's
own. Tested with torch 2.13. Private names used: `_maybe_opt_step`,
`_lazy_init_scale_growth_tracker` (here) and `_per_optimizer_states` (in `engine.capture.watch`) of
`torch.amp.GradScaler`.

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

from typing import Any

import jax
import numpy as np
import torch

from isoshard.core import metrics
from isoshard.torch_bridge.engine import base
from isoshard.torch_bridge.engine.capture.symbolic import CaptureError
from isoshard.torch_bridge.engine.recorder import recorder
from isoshard.torch_bridge.engine.value import Aval, Storage, Value
from isoshard.torch_bridge.engine.views import Chain


class _Scale:
    """Stands for a scale while torch takes its reciprocal, which is then taken in float32."""

    def __init__(self, scale: torch.Tensor):
        self._scale = scale
        self.device = scale.device

    def double(self) -> _Scale:
        return self

    reciprocal = double

    def float(self) -> torch.Tensor:
        return self._scale.reciprocal()


def register() -> None:
    """Replace the methods."""
    scaler: Any = torch.amp.GradScaler
    scaler._lazy_init_scale_growth_tracker = _first_use(scaler._lazy_init_scale_growth_tracker)
    scaler.unscale_ = _unscale(scaler.unscale_)
    scaler._maybe_opt_step = _step(scaler._maybe_opt_step)


def _first_use(theirs: Any) -> Any:
    def _lazy_init_scale_growth_tracker(self: Any, dev: torch.device) -> None:
        theirs(self, dev)
        if recorder().capture is not None and isinstance(self._scale, base.LazyTensor):
            self._scale = _from_before(self._init_scale, torch.float32)
            self._growth_tracker = _from_before(self._init_growth_tracker, torch.int32)

    return _lazy_init_scale_growth_tracker


def _from_before(number: float, dtype: torch.dtype) -> torch.Tensor:
    """A number on the device that no recorded operation makes."""
    aval = Aval.contiguous((), dtype)
    storage = Storage(Value(np.array(number, aval.physical)), aval)
    return base.new_tensor(aval, storage, Chain.root(aval))


def _unscale(theirs: Any) -> Any:
    def unscale_(self: Any, optimizer: torch.optim.Optimizer) -> None:
        scale: Any = getattr(self, "_scale", None)  # a scaler that is switched off has none
        if not isinstance(scale, base.LazyTensor) or jax.config.read("jax_enable_x64"):
            return theirs(self, optimizer)
        self._scale = _Scale(scale)
        try:
            return theirs(self, optimizer)
        finally:
            self._scale = scale

    unscale_.__doc__ = theirs.__doc__
    return unscale_


def _step(theirs: Any) -> Any:
    def _maybe_opt_step(
        self: Any,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if recorder().capture is not None and isinstance(
            getattr(self, "_scale", None), base.LazyTensor
        ):
            name = type(optimizer).__name__
            raise CaptureError(
                f"{metrics.user_location()}: GradScaler.step asks on the host whether to call "
                f"{name}.step, which a compiled step would not ask again. Make the optimizer with "
                "fused=True (Adam, AdamW, SGD, Adagrad), which decides on the device; with "
                "torch.bfloat16 no GradScaler is needed; or leave this part out of the compiled "
                "step."
            )
        return theirs(self, optimizer, state, *args, **kwargs)

    return _maybe_opt_step
