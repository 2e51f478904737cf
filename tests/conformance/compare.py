"""When a result counts as equal to CPU torch's.

Integers and booleans must be equal. Floating-point results must be within a tolerance of CPU
torch's, or else at most eight times as far from the result in the next wider type as CPU torch is.

>>> difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
>>> difference(torch.tensor([1, 2]), torch.tensor([1, 3]))
'1 of 2 elements differ, first at (1,): 3, torch gives 2'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

_TOLERANCE = {torch.bfloat16: (2e-2, 1e-2), torch.float16: (2e-3, 1e-3)}
_USUAL = (1e-4, 2e-5)
_SLACK = 8.0


def first_difference(want: Any, got: Any, wider: Callable[[], Any] | None = None) -> str | None:
    """What differs between two structures of CPU tensors and numbers, or None.

    Args:
        want: from CPU torch.
        got: from the `jax` device, brought to the CPU.
        wider: computes `want` in a wider type; called only where the values differ.
            None: there is no such second opinion.
    """
    wants, gots = pytree.tree_leaves(want), pytree.tree_leaves(got)
    if len(wants) != len(gots):
        return f"{len(gots)} results, torch gives {len(wants)}"
    for number, (wish, have) in enumerate(zip(wants, gots, strict=True)):
        fault = difference(wish, have)
        if fault and wider and _is_float(wish) and _is_float(have) and wish.shape == have.shape:
            fault = _settle(fault, wish, have, number, wider)
        if fault:
            return f"result {number}: {fault}" if len(wants) > 1 else fault
    return None


def _settle(fault: str, wish: Any, have: Any, number: int, wider: Callable[[], Any]) -> str | None:
    try:
        truth = pytree.tree_leaves(wider())[number]
    except Exception:  # torch has no such kernel: the narrow result stands
        return fault
    if wish.dtype != have.dtype or not _is_float(truth) or truth.shape != wish.shape:
        return fault
    return None if is_as_good(wish, have, truth) else fault


def is_as_good(wish: torch.Tensor, have: torch.Tensor, truth: torch.Tensor) -> bool:
    """Whether `have` is about as near to the truth as torch's own result is.

    Both may miss it by rounding. Where the truth is finite and torch's result is not, `have` must
    be near the truth, or be what torch's result is.
    """
    relative, absolute = _tolerance(wish)
    wide = torch.promote_types(truth.dtype, wish.dtype)
    wish, have, truth = (plain(value).to(wide) for value in (wish, have, truth))
    own = (wish - truth).abs()
    own = torch.where(torch.isfinite(own), own, 0)
    typical = own.mean() if own.numel() else own
    bound = absolute + relative * truth.abs() + _SLACK * torch.maximum(own, typical)
    near = torch.isfinite(truth) & ((have - truth).abs() <= bound)
    return bool((near | torch.isclose(have, wish, equal_nan=True)).all())


def _tolerance(wish: torch.Tensor) -> tuple[float, float]:
    """Relative and absolute tolerance; the latter grows with the size of a usual element."""
    if not _is_float(wish):
        return 0, 0
    relative, absolute = _TOLERANCE.get(wish.dtype, _USUAL)
    sizes = plain(wish).abs().float()
    sizes = sizes[torch.isfinite(sizes)]
    return relative, absolute * max(1.0, sizes.median().item() if sizes.numel() else 1.0)


def difference(wish: Any, have: Any) -> str | None:
    """What differs between two leaves, or None."""
    if not isinstance(wish, torch.Tensor):
        same = type(wish) is type(have) and (wish == have or (wish != wish and have != have))
        if isinstance(wish, float | complex) and isinstance(have, float | complex):
            same = difference(torch.tensor(wish), torch.tensor(have)) is None
        return None if same else f"{have!r}, torch gives {wish!r}"
    if not isinstance(have, torch.Tensor):
        return f"{type(have).__name__}, torch gives a tensor"
    if wish.shape != have.shape:
        return f"shape {tuple(have.shape)}, torch gives {tuple(wish.shape)}"
    if wish.dtype != have.dtype:
        return f"{have.dtype}, torch gives {wish.dtype}"
    if wish.layout != have.layout:
        return f"{have.layout}, torch gives {wish.layout}"
    wish, have = plain(wish), plain(have)
    relative, absolute = _tolerance(wish)
    equal = torch.isclose(have, wish, rtol=relative, atol=absolute, equal_nan=True)
    if equal.all():
        return None
    wrong = (~equal).nonzero()
    place = tuple(wrong[0].tolist())
    return (
        f"{len(wrong)} of {wish.numel()} elements differ, first at {place}: "
        f"{have[place].item()}, torch gives {wish[place].item()}"
    )


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values as a dense tensor without gradient, conjugate or negative bits."""
    return tensor.detach().to_dense().resolve_conj().resolve_neg()


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
