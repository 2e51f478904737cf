"""`torch.optim.Adafactor` without reading values: its norms stay on the device.

Torch's implementation reads two norms for each parameter, computes the step size in Python, and
has no `capturable` form. For parameters on the device the same arithmetic is done by tensors, so
that a lazy step is one program and `xs.compile` captures it. Step sizes are computed in float32 (of
float64 parameters in float64), where torch uses a Python float of a norm in the parameter's dtype.

>>> import isoshard.torch_bridge as xs
>>> weight = torch.nn.Parameter(torch.ones(4, 4, device="jax"))
>>> optimizer = torch.optim.Adafactor([weight], lr=0.1)
>>> @xs.compile
... def step():
...     weight.square().sum().backward()
...     optimizer.step()
...     optimizer.zero_grad()
>>> step(); step()
>>> weight[0, 0].item()    # doctest: +ELLIPSIS
0.8141...
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from isoshard.core.errors import PrivateNameError
from isoshard.torch_bridge._torch_internals.module_fields import ADAFACTOR
from isoshard.torch_bridge.engine.recording import lazy_tensor


def register() -> None:
    """Replace the functions."""
    for name in ADAFACTOR.values():
        with contextlib.suppress(PrivateNameError):  # what is left out is told where it is stated
            name.wrap(_adafactor)


def _adafactor(theirs: Any) -> Any:
    @functools.wraps(theirs)
    def adafactor(params: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        on_device = [isinstance(param, lazy_tensor.LazyTensor) for param in params]
        if not any(on_device):
            theirs(params, *args, **kwargs)
            return
        # Two more are of scaled gradients, which torch's function does not take either.
        options = {key: kwargs[key] for key in kwargs if key not in ("grad_scale", "found_inf")}
        for tensors in zip(params, *args[:5], strict=True):
            _update(*tensors, **options)

    return adafactor


def _update(
    param: torch.Tensor,
    grad: torch.Tensor,
    row_var: torch.Tensor | None,
    col_var: torch.Tensor | None,
    variance: torch.Tensor | None,
    count: torch.Tensor,
    *,
    d: float,
    lr: Any,
    beta2_decay: float,
    weight_decay: float,
    eps1: float | None,
    eps2: float,
    maximize: bool,
    has_complex: bool,
) -> None:
    """One parameter's update, line by line as in torch."""
    grad = -grad if maximize else grad
    eps1 = torch.finfo(param.dtype).eps if eps1 is None else eps1
    precise = torch.float64 if param.dtype is torch.float64 else torch.float32
    count += 1
    step = count.item()
    decay = step**beta2_decay
    if isinstance(lr, torch.Tensor) and not isinstance(lr, lazy_tensor.LazyTensor):
        lr = lr.item()
    rate: Any = 1 / step**0.5
    if isinstance(lr, torch.Tensor):
        rate = lr.to(precise).clamp(max=rate)
    else:
        rate = torch.sym_min(lr, rate)
    scale = (param.norm(2).to(precise) / param.numel() ** 0.5).clamp(min=eps2) * rate
    if weight_decay != 0:
        param.mul_(1 - lr * weight_decay)
    if row_var is not None and col_var is not None:
        row_mean = torch.norm(grad, dim=-1, keepdim=True).square_().div_(grad.size(-1))
        row_var.lerp_(row_mean, decay)
        col_mean = torch.norm(grad, dim=-2, keepdim=True).square_().div_(grad.size(-2))
        col_var.lerp_(col_mean, decay)
        estimate = row_var @ col_var
        estimate.div_(row_var.mean(dim=-2, keepdim=True).clamp_(min=eps1))
    else:
        assert variance is not None  # a vector's is not factored
        variance.lerp_(grad * grad, decay)
        estimate = variance.clone()
    update = estimate.clamp_(min=eps1 * eps1).rsqrt_().mul_(grad)
    clipping = (update.norm(2).to(precise) / (update.numel() ** 0.5 * d)).clamp(min=1.0)
    param.sub_(update * (scale / clipping))
