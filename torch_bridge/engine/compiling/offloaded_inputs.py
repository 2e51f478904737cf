"""Inputs of a program that rest in the memory of the host: brought in where they are first used.

An optimizer's state is used once, after the backward pass. It is brought in when the operation
before that one has been computed, so that it takes no memory of the devices while activations do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from isoshard.core.layout.offload import is_on_host, to_device_after


class OffloadedInputs:
    """The inputs that no operation has used so far.

    Args:
        env: the values of the program's slots; those brought in replace the ones that rest.
    """

    def __init__(self, env: list[Any]):
        """See the class."""
        self._env = env
        self._slots: set[int] = set()

    def note(self, slot: int) -> None:
        """An input has its value."""
        if is_on_host(self._env[slot]):
            self._slots.add(slot)

    def wake(self, operands: Sequence[int]) -> None:
        """Bring in what an operation is about to use, once its other operands are computed."""
        if not self._slots:
            return
        offloaded = [slot for slot in dict.fromkeys(operands) if slot in self._slots]
        if not offloaded:
            return
        env = self._env
        others = [env[slot] for slot in dict.fromkeys(operands) if slot not in self._slots]
        last = next((x for x in reversed(env) if x is not None and not is_on_host(x)), None)
        before = others if last is None else [*others, last]
        for slot, value in zip(
            offloaded, to_device_after([env[s] for s in offloaded], before), strict=True
        ):
            env[slot] = value
        self._slots.difference_update(offloaded)
