"""Guards: whether everything that a captured step has read is as it was.

A `Guard` holds the values of many holders. `holds` looks at all of them on every call of a compiled
step, so it does so in C (`grouped_holders`), by identity. Where one is another object, `change`
compares what the objects say: an equal number, string or tuple of such is no change.

>>> from isoshard.torch_bridge.engine.capture.holders import Elements
>>> class Trainer: ...
>>> trainer = Trainer()
>>> trainer.beta, trainer.layers = 0.5, [1, 2]
>>> guard = Guard([Names(vars(trainer), ("beta",), "trainer."), Elements(trainer.layers, "layers")])
>>> guard.holds()
True
>>> trainer.beta = -0.0
>>> guard.holds(), guard.change().text
(False, 'trainer.beta was 0.5 and is -0.0')
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import struct
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from isoshard.torch_bridge.engine.values.symbolic_numbers import settled

from .grouped_holders import Arranged, version
from .holders import MISSING, Holder, Names


@dataclasses.dataclass(frozen=True)
class Change:
    """A value that is another one.

    Attributes:
        name: how a program would write it.
        before: what it was.
        now: what it is.
        holder: what holds it.
        number: which of the holder's values; -1 for a name that is new.
        address: the same for two changes of the same value.
    """

    name: str
    before: Any
    now: Any
    holder: Holder
    number: int
    address: tuple[int, Any]

    @property
    def text(self) -> str:
        """For messages."""
        return f"{self.name} was {_brief(self.before)} and is {_brief(self.now)}"


_Skip = Callable[[Holder, int], bool] | None


class Guard:
    """Values as they were.

    Args:
        holders: what holds them.
        skip: `(holder, number)` of values that may change.
    """

    def __init__(self, holders: Sequence[Holder], skip: _Skip = None):
        """Remember the present values."""
        self.holders = list(holders)
        self._skip = skip
        self._often: set[int] = set()  # numbers of holders whose dictionary tells nothing
        self._versions = self._present_versions()
        self._values = [holder.read() for holder in self.holders]
        self._arrange()

    def holds(self) -> bool:
        """Whether every value is the same, or equal."""
        arranged = self._arranged
        try:
            if arranged.hold():
                if arranged.often:
                    self._often |= arranged.often
                    self._arrange()
                return True
        except (LookupError, AttributeError, ValueError, RuntimeError):
            pass  # what was read is not there, or another thread changes it: look at each
        return self.change() is None

    def change(self) -> Change | None:
        """The first value that changed, or None; equal objects are taken over."""
        versions = self._present_versions()
        values = [holder.read() for holder in self.holders]
        for holder, before, now in zip(self.holders, self._values, values, strict=True):
            for change in changes(holder, before, self._skip, now):
                return change
        self._versions, self._values = versions, values
        self._arrange()
        return None

    def _present_versions(self) -> list[int | None]:
        """Of each holder, to be asked before its values: what changes later has another one."""
        return [version(holder) for holder in self.holders]

    def _arrange(self) -> None:
        versions = [
            None if number in self._often else one for number, one in enumerate(self._versions)
        ]
        # Functions, not methods: what was read is to be freed with the step, not by a collection.
        skips, holds = (functools.partial(ask, self._skip) for ask in (_skips, _holds))
        self._arranged = Arranged(self.holders, self._values, versions, skips, holds)


def _skips(skip: _Skip, holder: Holder, values: Sequence[Any]) -> bool:
    return skip is not None and any(skip(holder, number) for number in range(len(values)))


def _holds(skip: _Skip, holder: Holder, before: Sequence[Any]) -> bool:
    return next(changes(holder, before, skip), None) is None


def changes(
    holder: Holder,
    before: Sequence[Any],
    skip: _Skip = None,
    now: Sequence[Any] | None = None,
) -> Iterator[Change]:
    """The values of a holder that are neither what they were nor equal to it.

    Args:
        holder: what holds them.
        before: what they were.
        skip: see `Guard`.
        now: what they are; read, if it is not given.
    """
    now = holder.read() if now is None else now
    for number in range(max(len(before), len(now))):
        old = before[number] if number < len(before) else MISSING
        new = settled(now[number]) if number < len(now) else MISSING
        if old is not new and not equal(old, new):
            if skip is None or type(old) is not type(new) or not skip(holder, number):
                address = holder.address(number) if number < len(now) else (id(holder.thing), None)
                yield Change(holder.name(number), old, new, holder, number, address)
    if isinstance(holder, Names):
        for key in holder.added():
            address = (id(holder.thing if holder.owner is None else holder.owner), key)
            yield Change(f"{holder.path}{key}", MISSING, holder.thing[key], holder, -1, address)


def equal(left: Any, right: Any) -> bool:
    """Whether two immutable values are the same to the last bit; False for anything else.

    >>> equal(0.0, 0.0), equal(0.0, -0.0), equal(1, True), equal((1, "a"), (1, "a"))
    (True, False, False, True)
    """
    kind = type(left)
    if kind is not type(right):
        return False
    if kind is float:
        return struct.pack("d", left) == struct.pack("d", right)
    if kind is complex:
        return struct.pack("dd", left.real, left.imag) == struct.pack("dd", right.real, right.imag)
    if kind is tuple:
        return len(left) == len(right) and all(
            a is b or equal(a, b) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, np.generic):
        return left.tobytes() == right.tobytes()
    if kind is types.MethodType:
        return left.__self__ is right.__self__ and left.__func__ is right.__func__
    return kind in _COMPARED and left == right


def is_plain(value: Any) -> bool:
    """Whether a value holds no memory: a number, a string, a function, a class, nothing."""
    plain = bool | int | float | complex | str | bytes | type(None) | torch.dtype | enum.Enum
    code = types.FunctionType | types.CodeType | type
    return value is MISSING or isinstance(value, np.generic | plain | code)


_COMPARED = frozenset(
    {int, bool, str, bytes, range, slice, frozenset, torch.Size, torch.device, np.dtype}
)


def _brief(value: Any) -> str:
    if value is MISSING:
        return "not there"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, bool | int | float | complex | str | bytes | type(None)) or (
        isinstance(value, tuple | torch.dtype)
    ):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    return f"one {type(value).__name__}" if not isinstance(value, type) else value.__qualname__
