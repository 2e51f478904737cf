"""Eager mode: every operation is executed at once.

Useful to find the operation that fails, or to read values in between; a step is then as many
programs as it has operations, so it is slow. Captured steps (`compile`) stay one program.

>>> import torch, isoshard.torch_bridge
>>> from isoshard import metrics
>>> metrics.reset()
>>> with context(True):
...     y = torch.ones(2, device="jax") + 1
>>> metrics.counters()["executions"]
2
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from isoshard.torch_bridge.kit import dispatch, lazy_tensor, program, recorder, regions

_enabled = False


def use(enable: bool) -> None:
    """Switch eager mode on or off, for all threads."""
    global _enabled
    _enabled = bool(enable)
    lazy_tensor.use_dispatch(_dispatch if _enabled else dispatch.dispatch)


def is_used() -> bool:
    """Whether eager mode is on."""
    return _enabled


@contextlib.contextmanager
def context(enable: bool) -> Iterator[bool]:
    """Context in which eager mode is on or off."""
    before = _enabled
    use(enable)
    try:
        yield before
    finally:
        use(before)


def _dispatch(
    cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """Record an operation and execute it, unless it belongs to a step that is one program."""
    result = dispatch.dispatch(cls, func, types, args, kwargs)
    if recorder().capture is None and regions.name() is None:
        program.sync()
    return result
