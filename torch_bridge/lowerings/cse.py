"""Subexpressions that several operators of one program share, computed once.

XLA merges equal instructions only after it has sharded them. Until then each of
two copies is moved by itself: the token numbers that an embedding reads, and again those that its
gradient writes.

>>> import jax.numpy as jnp
>>> tokens = jnp.arange(3)
>>> def column(x):
...     return x[:, None]
>>> with shared_program():
...     shared(column, tokens) is shared(column, tokens)
True
>>> shared(column, tokens) is shared(column, tokens)     # outside of a program, nothing is kept
False
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

_RESULTS: ContextVar[dict[Any, tuple[Any, Any]] | None] = ContextVar("_FOUND", default=None)


@contextlib.contextmanager
def shared_program() -> Iterator[None]:
    """For the time of the `with`, `shared` computes each thing once.

    A program inside of another one (the body of a loop) has its own: an array that belongs to a
    trace must not leave it.
    """
    token = _RESULTS.set({})
    try:
        yield
    finally:
        _RESULTS.reset(token)


def shared(compute: Callable[[Any], Any], array: Any) -> Any:
    """Look up what `compute` makes of an array in this program, or compute it.

    Args:
        compute: pure, and the same function each time.
        array: an array, concrete or traced.

    Returns:
        `compute(array)`.
    """
    cache = _RESULTS.get()
    if cache is None:
        return compute(array)
    key = compute, id(array)
    if key not in cache:
        cache[key] = array, compute(array)
    return cache[key][1]
