"""`torch.quantile` and `nanquantile`, with ranks in the dtype of the argument.

torch composes them of a sort and a gather; newer ones compute the ranks in float64, which JAX does
not hold unless asked to. The steps are those of ATen/native/Sorting.cpp:

>>> import torch, isoshard.torch_bridge
>>> x = torch.tensor([3.0, 1.0, 2.0, 5.0], device="jax")
>>> torch.quantile(x, 0.5).item()
2.5
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_WAYS = ("linear", "lower", "higher", "midpoint", "nearest")


def _quantile(
    name: str,
    x: torch.Tensor,
    q: Any,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
) -> torch.Tensor:
    _check(name, x, q, interpolation)
    if not isinstance(q, torch.Tensor):
        q = torch.full((), q, dtype=x.dtype, device=x.device)
    if x.dim() == 0 and dim is not None:
        x.sum(dim)  # raises for an axis that is not there
        dim = None
    ordered = (x.flatten() if dim is None else x.movedim(dim, -1)).sort(-1)[0]
    missing = ordered.isnan()
    if name == "nanquantile":
        last = (~missing).sum(-1, keepdim=True) - 1
        ranks = (q * last).clamp(min=0)
    else:
        ranks = (q * (ordered.shape[-1] - 1)).expand(*ordered.shape[:-1], q.numel())
        ordered = ordered.masked_fill(missing.any(-1, keepdim=True), torch.nan)
    values = _at(ordered, ranks, interpolation)
    if keepdim:
        axes = range(x.dim()) if dim is None else (dim % x.dim(),)
        for axis in axes:
            values = values.unsqueeze(axis)
    return values.squeeze(-1) if q.dim() == 0 else values.movedim(-1, 0)


quantile = functools.partial(_quantile, "quantile")
"""Quantiles along an axis, or of all elements; NaN where there is one."""
nanquantile = functools.partial(_quantile, "nanquantile")
"""Quantiles of what is not NaN."""


def _at(ordered: torch.Tensor, ranks: torch.Tensor, interpolation: str) -> torch.Tensor:
    """Elements at ranks that need not be integers."""
    if interpolation == "lower":
        ranks = ranks.floor()
    elif interpolation == "higher":
        ranks = ranks.ceil()
    elif interpolation == "nearest":
        ranks = ranks.round()
    below = ranks.long()
    values = ordered.gather(-1, below)
    if interpolation not in ("linear", "midpoint"):
        return values
    weights = torch.full_like(ranks, 0.5) if interpolation == "midpoint" else ranks - below
    return values.lerp(ordered.gather(-1, ranks.ceil().long()), weights)


def _check(name: str, x: torch.Tensor, q: Any, interpolation: str) -> None:
    if x.dtype not in (torch.float32, torch.float64):
        raise RuntimeError(
            f"{name}() input tensor must be either float or double dtype, got {x.dtype}"
        )
    if interpolation not in _WAYS:
        raise RuntimeError(
            f"{name}() interpolation must be one of linear, lower, higher, midpoint or nearest, "
            f"but got {interpolation}"
        )
    if x.numel() == 0:
        raise RuntimeError(f"{name}() input tensor must be non-empty")
    if not isinstance(q, torch.Tensor):
        if not 0 <= q <= 1:
            raise RuntimeError(f"{name}() q must be in the range [0, 1] but got {q}")
        return
    if q.dim() > 1:
        raise RuntimeError(f"{name}() q must be a scalar or 1D tensor, got {q.dim()} axes")
    if q.dtype != x.dtype:
        raise RuntimeError(
            f"{name}() q tensor must be same dtype as the input tensor, {x.dtype}, got {q.dtype}"
        )
    if q.device != x.device:
        raise RuntimeError(
            f"{name}() q tensor must be on the same device as the input tensor, {x.device}, got "
            f"{q.device}"
        )
