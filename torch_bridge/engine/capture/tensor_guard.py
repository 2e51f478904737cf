"""Whether the tensors of a captured step are what they were, apart from their elements.

A captured program reads and writes memory. `tensor.data = other`, `requires_grad_()`, a hook that
is registered, or a gradient that is there for the first time ask for another capture.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Sequence
from itertools import chain, repeat
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals.tensor_fields import all_hooks

from .. import base
from ..dropped import held, is_dropped
from ..hook_tables import given
from .resident import Residents


class TensorGuard:
    """Tensors as they were.

    Args:
        tensors: those that the step read or wrote.
        owners: those that may have a gradient.
        cleared: ids of the owners to whose gradients the step adds nothing: one that was left out
            is none for it.
    """

    def __init__(
        self,
        tensors: Iterable[base.LazyTensor],
        owners: Sequence[torch.Tensor],
        cleared: Container[int] = (),
    ):
        """Remember memory, gradients and hooks."""
        self._tensors = list(tensors)
        self._storages = [tensor._storage for tensor in self._tensors]
        self._marks = list(map(_MARK, self._storages))
        self._residents: Residents | None = None
        self._owners = list(owners)
        self._wanted = list(map(_REQUIRES_GRAD, self._owners))
        self._cleared = [id(owner) in cleared for owner in self._owners]
        self._held = self._gradients_held()
        self._gradients = self._gradient_states()
        self._told = all(isinstance(owner, base.LazyTensor) for owner in owners)
        self._given: Any = given.last  # before the look: what is given later is another
        self._hooks = self._hook_states()
        self._note_tables(self._given)

    def holds(self) -> bool:
        """Whether nothing of it changed."""
        with torch.DisableTorchFunctionSubclass():
            return self._holds()

    def _holds(self) -> bool:
        return (
            self.are_in_place()
            and self._are_marked()
            and list(map(_REQUIRES_GRAD, self._owners)) == self._wanted
            and (self._given is given.last or self._hooks_hold())
            and self._gradients_fit()
        )

    def _hooks_hold(self) -> bool:
        """Whether each owner has the hooks that it had."""
        last = given.last
        if self._hook_states() != self._hooks:
            return False
        self._note_tables(last)
        return True

    def _note_tables(self, last: object) -> None:
        """Look no more until a table is given, if no owner has one: an empty one can be filled."""
        tables = chain.from_iterable(map(all_hooks, self._owners))
        bare = self._told and all(map(operator.is_, tables, repeat(None)))
        self._given = last if bare else _OTHER

    def keep(self, residents: Residents) -> None:
        """Let memory that stays with the step tell itself when it is annotated.

        Args:
            residents: looked at in each call before this guard is.
        """
        self._residents = residents
        others = [
            (storage, mark)
            for storage, mark in zip(self._storages, self._marks, strict=True)
            if not residents.owns(storage)
        ]
        self._strangers = [storage for storage, _ in others]
        self._their_marks = [mark for _, mark in others]

    def _are_marked(self) -> bool:
        """Whether the memory has the layouts that were asked for."""
        storages, marks = self._storages, self._marks
        if self._residents is not None and self._residents.are_here():
            storages, marks = self._strangers, self._their_marks
        return all(map(operator.is_, map(_MARK, storages), marks))

    def are_in_place(self) -> bool:
        """Whether the tensors view the memory that they viewed."""
        return all(map(operator.is_, map(_STORAGE, self._tensors), self._storages))

    def _gradients_fit(self) -> bool:
        """Whether the gradients are those of the last call, or of their kind."""
        if all(map(operator.is_, map(held, self._owners), self._held)):
            if self._gradients is None:
                return True
        self._held = self._gradients_held()
        return self._gradient_states() == self._gradients

    @property
    def lacks_gradients(self) -> bool:
        """Whether, when it was looked at last, an owner had no gradient, not even one left out."""
        return self._lacks

    def _gradients_held(self) -> list[Any]:
        """The gradients, as far as they are none or left out: others must not be kept alive."""
        found = list(map(held, self._owners))
        self._lacks = any(map(operator.is_, found, repeat(None)))
        return [one if one is None or is_dropped(one) else _OTHER for one in found]

    def _gradient_states(self) -> tuple[Any, ...] | None:
        states = [
            None if one is None or (cleared and one is not _OTHER) else gradient_state(held(owner))
            for one, cleared, owner in zip(self._held, self._cleared, self._owners, strict=True)
        ]
        return tuple(states) if any(state is not None for state in states) else None

    def _hook_states(self) -> tuple[Any, ...] | None:
        if not any(chain.from_iterable(map(all_hooks, self._owners))):
            return None
        hooks = chain.from_iterable(map(all_hooks, self._owners))
        return tuple([tuple(one.values()) if one else None for one in hooks])


def gradient_state(gradient: Any) -> Any:
    """What a program depends on in a gradient that it finds."""
    if not isinstance(gradient, base.LazyTensor):
        return None
    if is_dropped(gradient):
        return "left out"
    return (gradient._aval, gradient._chain, gradient._storage.value.layout)


_STORAGE = operator.attrgetter("_storage")
_MARK = operator.attrgetter("annotation")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_OTHER = object()
