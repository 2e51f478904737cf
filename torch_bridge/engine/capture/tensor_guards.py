"""Guards on tensors, and what a step changes of tensors besides their elements.

A captured program reads and writes storages. `tensor.data = other`, `requires_grad_()`, a
registered hook or a first gradient need another capture: `TensorGuard` checks for them.

A step itself may call `x.unsqueeze_(0)`, `x.resize_(4)`, `x.data = ..` or `x.requires_grad_()`,
which change the tensor and no storage, so no program repeats them. A replay repeats them on its
arguments; a step that does so to another tensor is not replayed.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, Protocol

import torch

from isoshard.torch_bridge._torch_internals.tensor_fields import all_hooks
from isoshard.torch_bridge._torch_internals.undocumented import (
    DisableTorchFunctionSubclass,
    Uninitialized,
)
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.tensor_changes import changes, namespace
from isoshard.torch_bridge.engine.values.value import Aval, Storage
from isoshard.torch_bridge.engine.values.views import Chain

from .step_gradients import held, is_dropped


@dataclasses.dataclass(frozen=True)
class Description:
    """How a tensor views which memory, and whether it is a leaf that wants a gradient.

    Attributes:
        storage: the memory.
        aval: size, stride and dtype.
        chain: the view.
        offset: where it begins in its memory.
        wants: whether it requires a gradient; None of a tensor that has a graph.
    """

    storage: Storage
    aval: Aval
    chain: Chain
    offset: int
    wants: bool | None

    @classmethod
    def of(cls, tensor: lazy_tensor.LazyTensor) -> Description:
        """The present one."""
        wants = tensor.requires_grad if tensor.is_leaf else None
        offset = int(tensor.storage_offset())
        return cls(tensor._storage, tensor._aval, tensor._chain, offset, wants)

    def differs(self, now: Description) -> str:
        """What another description changes, for messages."""
        was, is_ = self.aval.meta, now.aval.meta
        shape = f"shape {tuple(was.size)}"
        if was != is_ or self.offset != now.offset:
            return f"{shape}, which gets shape {tuple(is_.size)} and stride {tuple(is_.stride)}"
        if self.wants != now.wants:
            return f"{shape}, whose requires_grad becomes {now.wants}"
        return f"{shape}, which gets other memory (.data, set_)"

    def give(self, tensor: lazy_tensor.LazyTensor, storage: Storage | None = None) -> None:
        """Let a tensor be so.

        Args:
            tensor: to be changed.
            storage: its memory, if it is another one.
        """
        memory = storage or self.storage
        if (tensor._storage, tensor._aval, tensor._chain) != (memory, self.aval, self.chain):
            view = lazy_tensor.new_tensor(self.aval, memory, self.chain, self.offset)
            lazy_tensor.adopt(tensor, view)
        if self.wants is not None and tensor.is_leaf and tensor.requires_grad != self.wants:
            tensor.requires_grad_(self.wants)


class Descriptions:
    """Those of tensors that were there before a step."""

    def __init__(self) -> None:
        """None yet."""
        self._before: dict[int, tuple[lazy_tensor.LazyTensor, Description]] = {}

    def include(self, tensors: Iterable[object]) -> None:
        """Remember those of tensors that the step has not changed so far."""
        for tensor in tensors:
            if isinstance(tensor, lazy_tensor.LazyTensor) and id(tensor) not in self._before:
                self._before[id(tensor)] = tensor, Description.of(tensor)

    def changed(self) -> Iterator[tuple[lazy_tensor.LazyTensor, Description, Description]]:
        """The tensors that are otherwise by now: how they were, and how they are."""
        for tensor, before in self._before.values():
            now = Description.of(tensor)
            if now != before and (now.wants is None) == (before.wants is None):
                yield tensor, before, now

    def changes(
        self, arguments: Sequence[lazy_tensor.LazyTensor]
    ) -> tuple[list[tuple[int, Description]], str | None]:
        """What a replay gives to which arguments; and why it could not repeat other changes.

        Args:
            arguments: of the step.
        """
        numbers = {id(argument): number for number, argument in enumerate(arguments)}
        turned = []
        for tensor, before, now in self.changed():
            number = numbers.get(id(tensor))
            if number is None or now.storage is not before.storage:
                return [], f"it changes a tensor of {before.differs(now)} in place"
            turned.append((number, now))
        return turned, None

    def put_back(self) -> None:
        """Let all be as they were."""
        for tensor, before, _ in list(self.changed()):
            before.give(tensor)


class Staying(Protocol):
    """Memory that stays with a step between its runs."""

    def are_here(self) -> bool:
        """Whether nobody has looked at any of it, or annotated it, since the last run."""
        ...

    def owns(self, storage: Storage) -> bool:
        """Whether it is some of this memory."""
        ...


class TensorGuard:
    """Tensors as they were.

    Args:
        tensors: those that the step can have asked for something, if only for their shape.
        owners: those that may have a gradient, or require one.
        cleared: ids of the owners to whose gradients the step adds nothing: one that was left out
            is none for it.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        owners: Sequence[torch.Tensor],
        cleared: Container[int] = (),
    ):
        """Remember memory, gradients and hooks."""
        every = list(tensors)
        self._tensors = [tensor for tensor in every if isinstance(tensor, lazy_tensor.LazyTensor)]
        self._others = [one for one in every if not isinstance(one, lazy_tensor.LazyTensor)]
        self._metas = self._other_metas()
        self._storages = [tensor._storage for tensor in self._tensors]
        self._views = list(map(_VIEW, self._tensors))
        self._graph = list(map(_GRAPH, self._tensors))
        self._marks = list(map(_MARK, self._storages))
        self._residents: Staying | None = None
        self._owners = list(owners)
        self._wanted = list(map(_REQUIRES_GRAD, self._owners))
        pairs = zip(self._owners, self._wanted, strict=True)
        self._frozen = [owner for owner, wanted in pairs if not wanted]
        self._cleared = [id(owner) in cleared for owner in self._owners]
        self._told = all(isinstance(owner, lazy_tensor.LazyTensor) for owner in owners)
        self._last: Any = _OTHER
        self._tables: Any = changes.tables  # before the look: what is given later is another
        self._namespaces = list(map(namespace, self._tensors))
        self._hooks = self._hook_states()
        self._note_tables(self._tables)
        self._held = self._gradients_held()
        self._gradients = self._gradient_states()

    def holds(self) -> bool:
        """Whether nothing of it changed."""
        if self._last is changes.last:
            frozen = not any(map(_REQUIRES_GRAD, self._frozen))
            return frozen and self._are_marked() and self._other_metas() == self._metas
        with DisableTorchFunctionSubclass():
            return self._holds()

    def _holds(self) -> bool:
        last = changes.last
        holds = (
            self.are_in_place()
            and self._are_marked()
            and self._other_metas() == self._metas
            and list(map(_GRAPH, self._tensors)) == self._graph
            and list(map(_REQUIRES_GRAD, self._owners)) == self._wanted
            and (self._tables is changes.tables or self._tables_hold())
            and self._gradients_fit()
        )
        if holds:
            self._last = last if self._tells else _OTHER
        return holds

    def _tables_hold(self) -> bool:
        """Whether each owner has the hooks that it had, and each tensor its `__dict__`."""
        tables = changes.tables
        if not all(map(operator.is_, map(namespace, self._tensors), self._namespaces)):
            return False
        if self._hook_states() != self._hooks:
            return False
        self._note_tables(tables)
        return True

    def _note_tables(self, last: object) -> None:
        """Look no more until a table is given, if no owner has one: an empty one can be filled."""
        tables = chain.from_iterable(map(all_hooks, self._owners))
        bare = self._told and all(map(operator.is_, tables, repeat(None)))
        self._tables = last if bare else _OTHER

    @property
    def _tells(self) -> bool:
        """Whether every change of it is reported (`tensor_changes`)."""
        return self._told and self._tables is not _OTHER and not self._open

    def keep(self, residents: Staying) -> None:
        """Let resident memory report when it is annotated.

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

    def _other_metas(self) -> list[Any]:
        """What a step can ask of tensors on the CPU, but for their elements."""
        return list(map(_meta, self._others))

    def are_in_place(self) -> bool:
        """Whether the tensors view the memory that they viewed, as they viewed it."""
        now = chain.from_iterable(map(_VIEW, self._tensors))
        return all(map(operator.is_, now, chain.from_iterable(self._views)))

    def _gradients_fit(self) -> bool:
        """Whether the gradients are those of the last call, or of their kind."""
        if all(map(operator.is_, map(held, self._owners), self._held)):
            if self._gradients is None:
                return True
        self._held = self._gradients_held()
        return self._gradient_states() == self._gradients

    @property
    def lacks_gradients(self) -> bool:
        """Whether, at the last look, an owner that requires one had none, not even one left out."""
        return self._lacks

    def _gradients_held(self) -> list[Any]:
        """The gradients, as far as they are none or left out: others must not be kept alive."""
        found = list(map(held, self._owners))
        pairs = zip(found, self._wanted, strict=True)
        self._lacks = any(one is None and wanted for one, wanted in pairs)
        kept = [one if one is None or is_dropped(one) else _OTHER for one in found]
        # C++ adds to a gradient, or gives one to a tensor without; to one left out it cannot.
        self._open = self._lacks or any(one is _OTHER for one in kept)
        return kept

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
    if not isinstance(gradient, lazy_tensor.LazyTensor):
        return None
    if is_dropped(gradient):
        return "left out"
    return (gradient._aval, gradient._chain, gradient._storage.value.layout)


def _meta(tensor: torch.Tensor) -> tuple[Any, ...]:
    known = (type(tensor), tensor.dtype, tensor.layout, tensor.requires_grad, tensor.is_leaf)
    gradient = tensor.is_leaf and held(tensor) is None
    if isinstance(tensor, Uninitialized):
        return (*known, gradient)
    if tensor.is_nested:  # its tensors have shapes, it has none
        return (*known, gradient, tensor.dim(), tensor.size(0))
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return (*known, gradient, tensor.shape, strides, tensor.device)


_VIEW = operator.attrgetter("_storage", "_chain", "_aval")
_MARK = operator.attrgetter("annotation")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_GRAPH = operator.attrgetter("requires_grad", "is_leaf", "retains_grad")
_OTHER = object()
