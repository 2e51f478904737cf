"""What a step changes in Python's own state: counters, flags, caches.

A replay runs no Python code, so a step whose code counts in an attribute must not be replayed.
`Effects` remembers what the objects behind a step hold before it runs; afterwards it tells what
became another value, and can put everything back.

>>> import types
>>> trainer = types.SimpleNamespace(calls=0)
>>> found = Reachable()
>>> found.follow(trainer, "trainer")
>>> effects = Effects(found)
>>> trainer.calls += 1
>>> [change.text for change in effects.changes()]
['trainer.calls was 0 and is 1']
>>> effects.put_back()
>>> trainer.calls
0
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any

import torch

from .executed import Executed
from .guards import Change, changes
from .holders import MISSING, Holder, Items, Names
from .reachable import Reachable


class Effects:
    """What the objects behind a step held before it ran.

    Args:
        reachable: those objects.
    """

    def __init__(self, reachable: Reachable):
        """Remember the present values."""
        self._holders = reachable.holders
        self._values = [holder.read() for holder in self._holders]
        self._states = {id(optimizer.state) for optimizer in reachable.optimizers}
        self._scalers = {id(vars(scaler)) for scaler in reachable.scalers}
        self._known = {_identity(holder) for holder in self._holders}

    def changes(self) -> Iterator[Change]:
        """What holds another value by now."""
        for holder, before in zip(self._holders, self._values, strict=True):
            yield from changes(holder, before)

    def counting(
        self,
        executed: Executed,
        after: Reachable,
        is_outer: Callable[[Any], bool],
        written: Container[tuple[int, Any]] = (),
    ) -> Change | None:
        """A change that a replay would have to repeat, or None.

        Left out are tensors that the step computed, which a replay computes; the state that an
        optimizer makes, which is kept; and names to which the step gives a value without reading
        them: it would give the same value again.

        Args:
            executed: the code that ran.
            after: what this code could reach.
            is_outer: whether a tensor was there before the step.
            written: addresses of values that a replay writes.
        """
        for change in self.changes():
            if change.address not in written and not self._is_repeated(change, executed, is_outer):
                return change
        for holder in after.holders:
            if _identity(holder) not in self._known:
                for number, key in enumerate(getattr(holder, "keys", ())):
                    if key in executed.stored and key not in executed.only_stored:
                        value = holder.read()[number]
                        address = holder.address(number)
                        if not isinstance(value, torch.Tensor) and address not in written:
                            name = holder.name(number)
                            return Change(name, MISSING, value, holder, number, address)
        return None

    def put_back(self) -> None:
        """Let every object hold what it held; optimizers keep the state that they made."""
        for holder, before in zip(self._holders, self._values, strict=True):
            if id(holder.thing) not in self._states and next(changes(holder, before), None):
                holder.put_back(before)

    def _is_repeated(
        self, change: Change, executed: Executed, is_outer: Callable[[Any], bool]
    ) -> bool:
        holder, now = change.holder, change.now
        if isinstance(holder, Names):
            key = change.name[len(holder.path) :]
            if key in executed.only_stored and not isinstance(now, torch.Tensor):
                return True
        if isinstance(now, torch.Tensor) and not is_outer(now):
            return True
        if id(holder.thing) in self._scalers:
            return isinstance(now, torch.Tensor)
        return id(holder.thing) in self._states and _is_new_state(holder, change)


def _identity(holder: Holder) -> int:
    """Of what holds the values; the namespace of a class is another object each time."""
    owner = holder.owner if isinstance(holder, Names) else None
    return id(holder.thing if owner is None else owner)


def _is_new_state(holder: Holder, change: Change) -> bool:
    """Whether an optimizer made the state of a parameter, of tensors only."""
    if change.before is not MISSING or not isinstance(holder, Items):
        return False
    if isinstance(change.now, dict):
        return all(isinstance(value, torch.Tensor) for value in change.now.values())
    return isinstance(change.now, torch.Tensor)
