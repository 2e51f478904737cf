"""Writes of several values at the places of a mask: as many as the mask has.

torch counts the places at the call. Here they are counted at once where the elements of the mask
are in host memory; else the program counts them, see `deferred_checks`.

>>> x = torch.zeros(3, device="jax")
>>> x[torch.tensor([True, False, True], device="jax")] = torch.ones(3, device="jax")
Traceback (most recent call last):
...
RuntimeError: shape mismatch: value tensor of shape [3] cannot be broadcast to indexing result of \
shape [2]
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from isoshard.core.runtime import metrics
from isoshard.core.runtime.private_names import optional
from isoshard.torch_bridge._torch_internals import OpOverload
from isoshard.torch_bridge.engine.recording import deferred_checks, lazy_tensor
from isoshard.torch_bridge.engine.recording.recorder import recorder
from isoshard.torch_bridge.engine.recording.tape import Tape

from . import dispatch

aten = torch.ops.aten
MASKS = (torch.bool, torch.uint8)


def warn_of_bytes(indices: Sequence[Any]) -> None:
    """Warn of each mask of bytes among indices, as torch does."""
    for index in indices:
        if index is not None and index.dtype == torch.uint8:
            warnings.warn(
                "indexing with dtype torch.uint8 is now deprecated, please use a dtype torch.bool "
                "instead.",
                UserWarning,
                stacklevel=2,
            )


def check_put(tensor: torch.Tensor, indices: Sequence[Any], values: torch.Tensor) -> None:
    """Check the number of values for `index_put` with one mask and no other index.

    Raises:
        RuntimeError: it is known to be another one than that of the places.
    """
    indexed = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if len(indexed) != 1 or indexed[0][1].dtype not in MASKS:
        return
    lead, mask = indexed[0]
    if mask.shape != tensor.shape[lead : lead + mask.dim()]:
        return  # another error
    before, after = tuple(tensor.shape[:lead]), tuple(tensor.shape[lead + mask.dim() :])
    count = values.shape[-1 - len(after)] if values.dim() > len(after) else 1
    if count != 1:
        message_for = functools.partial(_put_error, tuple(values.shape), before, count, after)
        _check(mask, 1, message_for, count <= mask.numel())


def _put_error(
    values: tuple[int, ...],
    before: tuple[int, ...],
    count: int,
    after: tuple[int, ...],
    selected: int | None,
) -> str | None:
    if selected == count:
        return None
    shown = "(how many the mask has)" if selected is None else selected
    return (
        f"shape mismatch: value tensor of shape {list(values)} cannot be broadcast to indexing "
        f"result of shape [{', '.join(map(str, (*before, shown, *after)))}]"
    )


def check_scatter(tensor: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> None:
    """Check that `masked_scatter` has a number for each place.

    Raises:
        RuntimeError: it is known to have fewer.
    """
    elements = math.prod(torch.broadcast_shapes(tensor.shape, mask.shape))
    if source.numel() >= elements or mask.dtype not in MASKS:
        return
    message_for = functools.partial(_scatter_error, source.numel())
    _check(mask, elements // mask.numel(), message_for, True)


def _scatter_error(count: int, selected: int | None) -> str | None:
    if selected is None or selected <= count:
        return None
    return (
        "masked_scatter: Number of elements of source < number of ones in mask: "
        f"{count} and {selected}"
    )


def _check(mask: torch.Tensor, repeats: int, message_for: Any, possible: bool) -> None:
    """Check the places of a mask now, and in the runs of the program if they may differ there."""
    static_count = _count(mask)
    if static_count is not None or not possible:
        message = message_for(None if static_count is None else static_count * repeats)
        if message is not None:
            raise RuntimeError(message)
    current = recorder()
    if (
        not isinstance(current, Tape)
        or current.plans
        or not isinstance(mask, lazy_tensor.LazyTensor)
    ):
        return  # what JAX traces returns no numbers in addition to its results
    if static_count is not None and current.capture is None:
        return
    line = metrics.user_location()
    count: Any = dispatch.handle(aten.count_nonzero.default, (mask,), {})

    def error(selected: int) -> Exception | None:
        message = message_for(selected * repeats)
        return None if message is None else RuntimeError(_LATER.format(message, line))

    deferred_checks.check(count, error)


_LATER = "{} (in the write at {}, of which only the run of the program tells the number of places)"


def _count(mask: torch.Tensor) -> int | None:
    """How many places a mask has, where its elements are in host memory."""
    if not isinstance(mask, lazy_tensor.LazyTensor):
        return int(torch.count_nonzero(mask)) if mask.device.type == "cpu" else None
    array = mask._storage.value.array
    if mask._chain.ops or not isinstance(array, np.ndarray):
        return None
    return int(np.count_nonzero(array))


def _checking(func: OpOverload, check: Any, writes: bool) -> dispatch.Handler:
    if writes:
        plain = dispatch.in_place_handler(func, ["self"])
    else:
        plain = dispatch.functional_handler(func)

    def handler(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) >= 3:  # by name it is a call of no one's but of torch.ops
            check(*args[:3])
        return plain(args, kwargs)

    return handler


def register() -> None:
    """Put `masked_scatter` into the dispatcher; of `index_put` there is more to look at."""
    for func, check, writes in (
        (aten.masked_scatter.default, check_scatter, False),
        (aten.masked_scatter_.default, check_scatter, True),
    ):
        dispatch.SPECIAL[func.name()] = _checking(func, check, writes)


with optional():
    register()
