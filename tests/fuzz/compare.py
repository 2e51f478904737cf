"""What counts as a difference between two runs of a program."""

from __future__ import annotations

from typing import Any

import torch

from . import noise, refused
from .program import Fact, Program

_TOLERANCE = {
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
}
"""Relative to the largest number of a tensor, and ten times as much relative to each element; 30
times both for gradients, whose formulas cancel inside one operation, where no noise reaches; and
as much as the coarsest dtype of the program: a float32 parameter's gradient may come through
bfloat16 numbers that no line names."""


def differences(program: Program, want: dict[str, Fact], got: dict[str, Fact]) -> list[str]:
    """What the `jax` device left that the CPU did not, one sentence each.

    Args:
        program: what was run.
        want: what it left on the CPU.
        got: what it left on the `jax` device, brought to the CPU.
    """
    found = []
    if list(want) != list(got):
        found.append(f"the CPU leaves {list(want)}, jax leaves {list(got)}")
    runs = None
    free = refused.strides(program)
    coarsest = max((_rounding(fact.tensor) for fact in want.values()), default=0.0)
    for name, fact in want.items():
        other = got.get(name)
        if other is None:
            continue
        if _promised(name, fact.shown, free) != _promised(name, other.shown, free):
            runs = noise.disturbed(program) if runs is None else runs
            if any(name in run and _shape(run[name]) != _shape(fact) for run in runs):
                continue  # rounding decides the shape: x[x > 0]
            found.append(f"{name}: {_said(fact.shown, other.shown)}")
            if fact.tensor is None or fact.tensor.shape != other.tensor.shape:
                continue
        if fact.tensor is None or fact.tensor.dtype != other.tensor.dtype:
            continue
        gap = noise.distance(other.tensor, fact.tensor)
        limit = _limit(fact.tensor)
        if name.endswith(".grad"):
            limit = torch.maximum(30 * limit, _limit(fact.tensor, coarsest))
            limit = limit.masked_fill(refused.too_large(fact.tensor), torch.inf)
            if refused.spreads_nan(program) and bool(fact.tensor.isnan().any()):
                limit = limit.masked_fill(other.tensor.isnan(), torch.inf)
        if bool((gap > limit).any()):
            runs = noise.disturbed(program) if runs is None else runs
            mine = [run[name].tensor for run in runs if name in run]
            limit = limit + noise.allowed(fact.tensor, mine)
        if bool((gap > limit).any()):
            place = tuple(int(i) for i in (gap > limit).nonzero()[0])
            found.append(
                f"{name}: {int((gap > limit).sum())} of {gap.numel()} elements differ, at "
                f"{list(place)} the CPU has {fact.tensor[place]}, jax has {other.tensor[place]}"
            )
    return found


def same(one: Fact, other: Fact) -> bool:
    """Whether two tensors have the same bits, but for NaN."""
    assert one.tensor is not None and other.tensor is not None
    return one.tensor.shape == other.tensor.shape and torch.equal(
        *(fact.tensor.nan_to_num(nan=7.25) for fact in (one, other))
    )


def _shape(fact: Fact) -> Any:
    return None if fact.tensor is None else fact.tensor.shape


def _promised(name: str, shown: Any, free: set[str]) -> Any:
    if name.partition(".")[0] not in free or not isinstance(shown, dict):
        return shown
    return {key: value for key, value in shown.items() if key not in ("stride", "offset")}


def _rounding(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None else _TOLERANCE.get(tensor.dtype, 0.0)


def _limit(want: torch.Tensor, tolerance: float | None = None) -> torch.Tensor:
    tolerance = _rounding(want) if tolerance is None else tolerance
    if tolerance == 0 or not want.numel():
        return torch.zeros(want.shape, dtype=torch.float64)
    size = want.abs().to(torch.float64)
    finite = size.nan_to_num(0.0, 0.0, 0.0)
    scale = max(1.0, float(finite.max()))
    return tolerance * scale + 10 * tolerance * finite


def _said(want, got) -> str:
    if isinstance(want, dict) and isinstance(got, dict):
        parts = [
            f"{key} {want[key]} on the CPU, {got.get(key)} on jax"
            for key in want
            if want[key] != got.get(key)
        ]
        return "; ".join(parts)
    return f"{want} on the CPU, {got} on jax"
