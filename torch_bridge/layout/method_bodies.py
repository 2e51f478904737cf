"""Bodies of a tensor's methods that are written with tensors.

Their modules import the class, so the class cannot import them. It has the method, its signature
and its words; the module of the body registers it.

>>> @body_of("twice")
... def twice(x):
...     return 2 * x
>>> BODIES["twice"](4)
8
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Body = TypeVar("Body", bound=Callable[..., Any])

BODIES: dict[str, Callable[..., Any]] = {}
"""By the name of the method; all there once `isoshard.torch_bridge` is imported."""


def body_of(method: str) -> Callable[[Body], Body]:
    """Register a function as what a method of `XLAShardedTensor` does; it stays as it is.

    Args:
        method: its name.
    """

    def register(body: Body) -> Body:
        BODIES[method] = body
        return body

    return register
