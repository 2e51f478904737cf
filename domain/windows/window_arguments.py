"""Arguments of operators over space; all their errors in one message.

>>> faults = ArgumentErrors("conv")
>>> faults.per_axis("stride", (2, 1), 2, least=1)
(2, 1)
>>> _ = faults.per_axis("dilation", 0, 2, least=1)
>>> faults.choice("mode", "mirror", ("zero", "wrap"))
>>> faults.raise_any()
Traceback (most recent call last):
    ...
isoshard.core.errors.ShardingError: conv: dilation 0 is no integer from 1 up, or 2 of them; mode 'mirror' is none of 'zero', 'wrap'
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from isoshard.core.kit import ShardingError


class ArgumentErrors:
    """The errors of one call's arguments.

    Args:
        verb: the operator, which begins the message.
    """

    def __init__(self, verb: str) -> None:
        """See the class."""
        self.verb = verb
        self.messages: list[str] = []

    def per_axis(self, name: str, value: Any, axes: int, *, least: int) -> tuple[int, ...]:
        """Read a number, or one for each axis."""
        values = (value,) * axes if is_integer(value) else value
        if (
            isinstance(values, Sequence)
            and len(values) == axes
            and all(is_integer(n) and n >= least for n in values)
        ):
            return tuple(map(int, values))
        self.messages.append(f"{name} {value!r} is no integer from {least} up, or {axes} of them")
        return (least,) * axes

    def choice(self, name: str, value: Any, possible: Sequence[str]) -> None:
        """Record an error unless `value` is among the possible ones."""
        if value not in possible:
            self.messages.append(f"{name} {value!r} is none of {', '.join(map(repr, possible))}")

    def require(self, condition: bool, message: str) -> None:
        """Record an error unless a condition holds."""
        if not condition:
            self.messages.append(message)

    def raise_any(self) -> None:
        """Raise the recorded errors as one ShardingError, if there are any."""
        if self.messages:
            raise ShardingError(f"{self.verb}: {'; '.join(self.messages)}")


def is_integer(value: Any) -> bool:
    """Whether a value is an integer (and no truth value)."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
