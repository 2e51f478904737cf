"""Hints that are added to torch's errors: from other rooms, by the name of the operation.

They are called for an error only.

>>> import torch
>>> @hint_for("aten::view")
... def dozen(args):
...     return "a dozen is 12" if args[0].numel() == 12 else None
>>> error = RuntimeError("invalid shape")
>>> add_hint(torch.ops.aten.view.default, (torch.ones(3, 4), [5]), error)
>>> str(error)
'invalid shape; a dozen is 12'
>>> _HINTS["aten::view"].remove(dozen)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from isoshard.torch_bridge._torch_internals import OpOverload

Hint = Callable[[tuple[Any, ...]], str | None]

_HINTS: dict[str, list[Hint]] = {}


def hint_for(name: str) -> Callable[[Hint], Hint]:
    """Register a function that may explain why an operation failed; returned unchanged.

    Args:
        name: of the operation, as `aten::view`. The function gets its arguments, and returns what
            to add to the message, or None.
    """

    def register(hint: Hint) -> Hint:
        _HINTS.setdefault(name, []).append(hint)
        return hint

    return register


def add_hint(func: OpOverload, args: tuple[Any, ...], error: Exception) -> None:
    """Add what is known to the message of an error of torch's own."""
    if type(error) is not RuntimeError:
        return
    for hint in _HINTS.get(func.name(), ()):
        if (text := hint(args)) is not None:
            error.args = (f"{error}; {text}",)
