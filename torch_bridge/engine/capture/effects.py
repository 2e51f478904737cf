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

from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge.engine.values.symbolic_numbers import present

from .executed import Executed
from .guards import Change, changes
from .holders import MISSING, Holder, Items, Names
from .reachable import Reachable
from .rebound import Rebound, rebound, tensors_of


class Effects:
    """What the objects behind a step held before it ran.

    Args:
        reachable: those objects.
    """

    def __init__(self, reachable: Reachable):
        """Remember the present values."""
        self._reachable = reachable
        self._holders: list[Holder] = []
        self._values: list[list[Any]] = []
        self.include_new()

    def include_new(self) -> None:
        """Remember the values of objects found since, which the step has not changed so far."""
        new = self._reachable.holders[len(self._holders) :]
        self._holders += new
        self._values += [list(map(present, holder.read())) for holder in new]

    def changes(self) -> Iterator[Change]:
        """What holds another value by now."""
        for holder, before in zip(self._holders, self._values, strict=True):
            yield from changes(holder, before)

    def counting(
        self,
        executed: Executed,
        is_outer: Callable[[Any], bool],
        written: Container[tuple[int, Any]] = (),
    ) -> tuple[Change | None, list[Rebound]]:
        """A change that a replay would have to repeat and cannot, or None; and what it binds anew.

        Left out are the state that an optimizer makes, which is kept; and names to which the step
        gives a value without reading them: it would give the same value again.

        Args:
            executed: the code that ran.
            is_outer: whether a tensor was there before the step.
            written: addresses of values that a replay writes.
        """
        bound: list[Rebound] = []
        for change in self.changes():
            if change.address in written or self._is_repeated(change, executed):
                continue
            found = rebound(change, is_outer)
            if found is None:
                return change, []
            bound.append(found)
        return None, bound

    def put_back_tensors(self, is_outer: Callable[[Any], bool]) -> None:
        """Let names that hold a tensor which the step made hold what they held."""
        for change in self.changes():
            place = change.holder.single(change.number) if change.number >= 0 else None
            if place is not None and not self._is_state(change.holder):
                if not all(map(is_outer, tensors_of(change.now))):
                    place.put_back([change.before])

    def put_back(self) -> None:
        """Let every object hold what it held; optimizers keep the state that they made."""
        for holder, before in zip(self._holders, self._values, strict=True):
            if next(changes(holder, before), None) and not self._is_state(holder):
                holder.put_back(before)

    def _is_repeated(self, change: Change, executed: Executed) -> bool:
        holder, now = change.holder, change.now
        if isinstance(holder, Names):
            key = change.name[len(holder.path) :]
            if key in executed.only_stored and not _holds_a_tensor(now):
                return True
        if any(vars(scaler) is holder.thing for scaler in self._reachable.scalers):
            return isinstance(now, torch.Tensor)
        return self._is_state(holder) and _is_new_state(holder, change)

    def _is_state(self, holder: Holder) -> bool:
        """Whether it is what an optimizer keeps of its parameters."""
        return any(optimizer.state is holder.thing for optimizer in self._reachable.optimizers)


def _holds_a_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def _is_new_state(holder: Holder, change: Change) -> bool:
    """Whether an optimizer made the state of a parameter, of tensors only."""
    if change.before is not MISSING or not isinstance(holder, Items):
        return False
    if isinstance(change.now, dict):
        return all(isinstance(value, torch.Tensor) for value in change.now.values())
    return isinstance(change.now, torch.Tensor)
