"""NNX modules with another `__call__` for a while, as instances of a subclass of their class.

No class is changed, and other modules of the same class are not affected.

>>> from flax import nnx
>>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
>>> kind = called_by(nnx.Linear, lambda self, x: "instead")
>>> with of_classes([(layer, kind)]):
...     layer(None)
'instead'
>>> type(layer) is nnx.Linear, kind.__name__
(True, 'Linear')
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def called_by(kind: type, call: Callable[..., Any]) -> type:
    """A subclass of `kind` with `call` as its `__call__`."""
    functools.update_wrapper(call, kind.__call__)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__call__": call}
    return type(kind)(kind.__name__, (kind,), names)


@contextlib.contextmanager
def of_classes(modules: Sequence[tuple[Any, type]]) -> Iterator[None]:
    """Inside the `with`, modules are instances of other classes."""
    before = [(module, type(module)) for module, _ in modules]
    try:
        for module, kind in modules:
            object.__setattr__(module, "__class__", kind)
        yield
    finally:
        for module, kind in before:
            object.__setattr__(module, "__class__", kind)
