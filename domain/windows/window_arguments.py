"""Arguments of operators over space, and every fault of them in one message.

>>> faults = Faults("conv")
>>> faults.per_axis("stride", (2, 1), 2, least=1)
(2, 1)
>>> _ = faults.per_axis("dilation", 0, 2, least=1)
>>> faults.choice("mode", "mirror", ("zero", "wrap"))
>>> faults.raise_any()
Traceback (most recent call last):
    ...
isoshard.core.errors.ShardingError: conv: dilation 0 is no whole number from 1 up, or 2 of them; mode 'mirror' is none of 'zero', 'wrap'
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from isoshard.core.errors import ShardingError


class Faults:
    """What is wrong with the arguments of one call.

    Args:
        verb: the operator, which begins the message.
    """

    def __init__(self, verb: str) -> None:
        """Begin with none."""
        self.verb = verb
        self.found: list[str] = []

    def per_axis(self, name: str, value: Any, axes: int, *, least: int) -> tuple[int, ...]:
        """Read a number, or one for each axis."""
        given = (value,) * axes if is_whole(value) else value
        if (
            isinstance(given, Sequence)
            and len(given) == axes
            and all(is_whole(number) and number >= least for number in given)
        ):
            return tuple(map(int, given))
        self.found.append(f"{name} {value!r} is no whole number from {least} up, or {axes} of them")
        return (least,) * axes

    def choice(self, name: str, value: Any, possible: Sequence[str]) -> None:
        """Note a value that is not among the possible ones."""
        if value not in possible:
            self.found.append(f"{name} {value!r} is none of {', '.join(map(repr, possible))}")

    def unless(self, right: bool, fault: str) -> None:
        """Note a fault, unless all is right."""
        if not right:
            self.found.append(fault)

    def raise_any(self) -> None:
        """Raise what was noted as one ShardingError, if anything was."""
        if self.found:
            raise ShardingError(f"{self.verb}: {'; '.join(self.found)}")


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number (and no truth value)."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
