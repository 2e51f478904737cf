"""Checks of values that only a run of the program computes.

The program returns the number to be checked, and nothing waits for it: it is looked at with the
next value of a tensor that is read, as a device-side assertion is reported at the next
synchronization.

>>> import torch, isoshard.torch_bridge
>>> x, mask = torch.zeros(3, device="jax"), torch.arange(3, device="jax") > 0
>>> x[mask] = torch.arange(1.0, 4, device="jax")       # three values, and two places
>>> x.tolist()  # doctest: +ELLIPSIS
Traceback (most recent call last):
...
RuntimeError: shape mismatch: value tensor of shape [3] cannot be broadcast to indexing result of \
shape [2] (in the write at ...
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from . import lazy_tensor
from .recorder import recorder

MOST = 128
"""Checks that wait for a read; beyond, those whose program has run are looked at in any case."""

CountCheck = Callable[[int], Exception | None]
"""The error of a number that was computed; None if it is as expected."""


class _Waiting(threading.local):
    """The checks of this thread, in the order of its operations."""

    def __init__(self) -> None:
        self.checks: list[tuple[lazy_tensor.LazyTensor, CountCheck]] = []


_WAITING = _Waiting()


def check(count: lazy_tensor.LazyTensor, error_of: CountCheck) -> None:
    """Check a number when the program has run that computes it; in each replay of a captured step.

    Raises:
        Exception: many are waiting, and one of them has failed.
    """
    current = recorder()
    if current.capture is not None:
        current.capture.deferred.append((count, error_of))
    else:
        defer(count, error_of)


def defer(count: lazy_tensor.LazyTensor, error_of: CountCheck) -> None:
    """As `check`, where no step is being captured."""
    _WAITING.checks.append((count, error_of))
    if len(_WAITING.checks) > MOST:
        raise_failed()


def raise_failed() -> None:
    """Look at the numbers that have been computed; those of failed programs are dropped.

    Raises:
        Exception: of the first check that has failed; each is reported once.
    """
    waiting = _WAITING.checks
    if not waiting:
        return
    _WAITING.checks = []
    for index, (count, error_of) in enumerate(waiting):
        value = count._storage.value
        if value.array is None:
            if value.tape is not None and not value.tape.failed:
                _WAITING.checks.append((count, error_of))
            continue
        shards = value.array.addressable_shards  # none in a process that has no part in it
        if shards and not shards[0].data.is_ready():  # of a later program than the one just read
            _WAITING.checks.append((count, error_of))
        elif shards and (error := error_of(int(np.asarray(shards[0].data)))) is not None:
            _WAITING.checks += waiting[index + 1 :]
            raise error
