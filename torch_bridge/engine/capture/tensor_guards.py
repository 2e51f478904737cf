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
from typing import Any

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

from .bindings import Inputs
from .step_gradients import is_dropped, raw_gradient


@dataclasses.dataclass(frozen=True)
class TensorMetadata:
    """The storage of a tensor, how the tensor views it, and `requires_grad` of a leaf.

    Attributes:
        storage: the storage.
        aval: size, stride and dtype.
        chain: the view.
        offset: the offset in its storage.
        requires_grad: whether it requires a gradient; None if the tensor is no leaf.
    """

    storage: Storage
    aval: Aval
    chain: Chain
    offset: int
    requires_grad: bool | None

    @classmethod
    def of(cls, tensor: lazy_tensor.LazyTensor) -> TensorMetadata:
        """The current metadata of a tensor."""
        requires_grad = tensor.requires_grad if tensor.is_leaf else None
        offset = int(tensor.storage_offset())
        return cls(tensor._storage, tensor._aval, tensor._chain, offset, requires_grad)

    def difference(self, now: TensorMetadata) -> str:
        """What differs in other metadata, for messages."""
        old, new = self.aval.meta, now.aval.meta
        shape = f"shape {tuple(old.size)}"
        if old != new or self.offset != now.offset:
            return f"{shape}, which gets shape {tuple(new.size)} and stride {tuple(new.stride)}"
        if self.requires_grad != now.requires_grad:
            return f"{shape}, whose requires_grad becomes {now.requires_grad}"
        return f"{shape}, which gets other memory (.data, set_)"

    def apply_to(self, tensor: lazy_tensor.LazyTensor, storage: Storage | None = None) -> None:
        """Set the metadata of a tensor, with another storage if one is passed."""
        memory = storage or self.storage
        if (tensor._storage, tensor._aval, tensor._chain) != (memory, self.aval, self.chain):
            view = lazy_tensor.new_tensor(self.aval, memory, self.chain, self.offset)
            lazy_tensor.adopt(tensor, view)
        if (
            self.requires_grad is not None
            and tensor.is_leaf
            and tensor.requires_grad != self.requires_grad
        ):
            tensor.requires_grad_(self.requires_grad)


class MetadataLog:
    """The metadata of tensors from before a step."""

    def __init__(self) -> None:
        """See the class."""
        self._before: dict[int, tuple[lazy_tensor.LazyTensor, TensorMetadata]] = {}

    def include(self, tensors: Iterable[object]) -> None:
        """Store the metadata of tensors, which the step has not changed so far."""
        for tensor in tensors:
            if isinstance(tensor, lazy_tensor.LazyTensor) and id(tensor) not in self._before:
                self._before[id(tensor)] = tensor, TensorMetadata.of(tensor)

    def changed(self) -> Iterator[tuple[lazy_tensor.LazyTensor, TensorMetadata, TensorMetadata]]:
        """The tensors with other metadata, and their earlier and current metadata."""
        for tensor, before in self._before.values():
            now = TensorMetadata.of(tensor)
            if now != before and (now.requires_grad is None) == (before.requires_grad is None):
                yield tensor, before, now

    def changes(
        self, arguments: Sequence[lazy_tensor.LazyTensor]
    ) -> tuple[list[tuple[int, TensorMetadata]], str | None]:
        """The arguments with new metadata; or why a replay cannot repeat a change."""
        indices = {id(argument): index for index, argument in enumerate(arguments)}
        changed_arguments = []
        for tensor, before, now in self.changed():
            index = indices.get(id(tensor))
            if index is None or now.storage is not before.storage:
                return [], f"it changes a tensor of {before.difference(now)} in place"
            changed_arguments.append((index, now))
        return changed_arguments, None

    def restore(self) -> None:
        """Restore all."""
        for tensor, before, _ in list(self.changed()):
            before.apply_to(tensor)


class TensorGuard:
    """The metadata, gradients and hooks of tensors at one time.

    Args:
        tensors: those of which the step can have read anything, if only the shape.
        owners: those that may have a gradient, or require one.
        cleared: ids of the owners whose gradients the step clears: a dropped one counts as None.

    Attributes:
        misses_gradients: whether an owner that requires a gradient had none in the last check.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        owners: Sequence[torch.Tensor],
        cleared: Container[int] = (),
    ):
        """Store the current ones."""
        all_tensors = list(tensors)
        self._tensors = [
            tensor for tensor in all_tensors if isinstance(tensor, lazy_tensor.LazyTensor)
        ]
        self._cpu_tensors = [
            tensor for tensor in all_tensors if not isinstance(tensor, lazy_tensor.LazyTensor)
        ]
        self._cpu_metadata = self._read_cpu_metadata()
        self._storages = [tensor._storage for tensor in self._tensors]
        self._views = list(map(_VIEW, self._tensors))
        self._graph = list(map(_GRAPH, self._tensors))
        self._annotations = list(map(_ANNOTATION, self._storages))
        self._owned: Inputs | None = None
        self._owners = list(owners)
        self._requires_grad = list(map(_GET_REQUIRES_GRAD, self._owners))
        pairs = zip(self._owners, self._requires_grad, strict=True)
        self._frozen = [owner for owner, requires_grad in pairs if not requires_grad]
        self._cleared = [id(owner) in cleared for owner in self._owners]
        self._all_lazy = all(isinstance(owner, lazy_tensor.LazyTensor) for owner in owners)
        self._last_change: Any = _UNKNOWN
        self._hook_tables: Any = changes.tables  # read first: a later change is then seen
        self._namespaces = list(map(namespace, self._tensors))
        self._hooks = self._read_hooks()
        self._keep_hook_tables(self._hook_tables)
        self._last_gradients = self._read_gradients()
        self._gradient_metadata = self._read_gradient_metadata()

    def check(self) -> bool:
        """Whether all are unchanged."""
        if self._last_change is changes.last:
            frozen = not any(map(_GET_REQUIRES_GRAD, self._frozen))
            return (
                frozen
                and self._annotations_unchanged()
                and self._read_cpu_metadata() == self._cpu_metadata
            )
        with DisableTorchFunctionSubclass():
            return self._check_all()

    def _check_all(self) -> bool:
        last = changes.last
        unchanged = (
            self.views_unchanged()
            and self._annotations_unchanged()
            and self._read_cpu_metadata() == self._cpu_metadata
            and list(map(_GRAPH, self._tensors)) == self._graph
            and list(map(_GET_REQUIRES_GRAD, self._owners)) == self._requires_grad
            and (self._hook_tables is changes.tables or self._hook_tables_unchanged())
            and self._gradients_unchanged()
        )
        if unchanged:
            self._last_change = last if self._reports_changes else _UNKNOWN
        return unchanged

    def _hook_tables_unchanged(self) -> bool:
        """Whether the hooks of each owner and the `__dict__` of each tensor are unchanged."""
        tables = changes.tables
        if not all(map(operator.is_, map(namespace, self._tensors), self._namespaces)):
            return False
        if self._read_hooks() != self._hooks:
            return False
        self._keep_hook_tables(tables)
        return True

    def _keep_hook_tables(self, last: object) -> None:
        """Skip the check until a hook table is set, if no owner has a table."""
        tables = chain.from_iterable(map(all_hooks, self._owners))
        bare = self._all_lazy and all(map(operator.is_, tables, repeat(None)))
        self._hook_tables = last if bare else _UNKNOWN

    @property
    def _reports_changes(self) -> bool:
        """Whether `tensor_changes` reports every change."""
        return self._all_lazy and self._hook_tables is not _UNKNOWN and not self._may_get_gradients

    def set_owned(self, owned: Inputs) -> None:
        """Leave it to owned storages to report when they are annotated."""
        self._owned = owned
        others = [
            (storage, annotation)
            for storage, annotation in zip(self._storages, self._annotations, strict=True)
            if not owned.owns(storage)
        ]
        self._not_owned = [storage for storage, _ in others]
        self._annotations_not_owned = [annotation for _, annotation in others]

    def _annotations_unchanged(self) -> bool:
        """Whether the shardings that users marked are unchanged."""
        storages, annotations = self._storages, self._annotations
        if self._owned is not None and self._owned.are_owned():
            storages, annotations = self._not_owned, self._annotations_not_owned
        return all(map(operator.is_, map(_ANNOTATION, storages), annotations))

    def _read_cpu_metadata(self) -> list[Any]:
        """What a step can read of CPU tensors besides their elements."""
        return list(map(_metadata, self._cpu_tensors))

    def views_unchanged(self) -> bool:
        """Whether the tensors have the same storages, views, shapes and dtypes."""
        now = chain.from_iterable(map(_VIEW, self._tensors))
        return all(map(operator.is_, now, chain.from_iterable(self._views)))

    def _gradients_unchanged(self) -> bool:
        """Whether the gradients are those of the last call, or have the same metadata."""
        if all(map(operator.is_, map(raw_gradient, self._owners), self._last_gradients)):
            if self._gradient_metadata is None:
                return True
        self._last_gradients = self._read_gradients()
        return self._read_gradient_metadata() == self._gradient_metadata

    def _read_gradients(self) -> list[Any]:
        """The gradients that are None or dropped; no reference is kept to others."""
        gradients = list(map(raw_gradient, self._owners))
        pairs = zip(gradients, self._requires_grad, strict=True)
        self.misses_gradients = any(gradient is None and required for gradient, required in pairs)
        comparable = [
            gradient if gradient is None or is_dropped(gradient) else _UNKNOWN
            for gradient in gradients
        ]
        # C++ adds to a gradient, or sets one that is None, unreported; a dropped one raises.
        self._may_get_gradients = self.misses_gradients or any(
            gradient is _UNKNOWN for gradient in comparable
        )
        return comparable

    def _read_gradient_metadata(self) -> tuple[Any, ...] | None:
        states = [
            None
            if gradient is None or (cleared and gradient is not _UNKNOWN)
            else gradient_state(raw_gradient(owner))
            for gradient, cleared, owner in zip(
                self._last_gradients, self._cleared, self._owners, strict=True
            )
        ]
        return tuple(states) if any(state is not None for state in states) else None

    def _read_hooks(self) -> tuple[Any, ...] | None:
        if not any(chain.from_iterable(map(all_hooks, self._owners))):
            return None
        hooks = chain.from_iterable(map(all_hooks, self._owners))
        return tuple([tuple(table.values()) if table else None for table in hooks])


def gradient_state(gradient: Any) -> Any:
    """What a program depends on in an earlier gradient."""
    if not isinstance(gradient, lazy_tensor.LazyTensor):
        return None
    if is_dropped(gradient):
        return "left out"
    return (gradient._aval, gradient._chain, gradient._storage.value.layout)


def _metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    fields = (type(tensor), tensor.dtype, tensor.layout, tensor.requires_grad, tensor.is_leaf)
    may_get_gradient = tensor.is_leaf and raw_gradient(tensor) is None
    if isinstance(tensor, Uninitialized):
        return (*fields, may_get_gradient)
    if tensor.is_nested:  # it has no shape
        return (*fields, may_get_gradient, tensor.dim(), tensor.size(0))
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return (*fields, may_get_gradient, tensor.shape, strides, tensor.device)


_VIEW = operator.attrgetter("_storage", "_chain", "_aval")
_ANNOTATION = operator.attrgetter("annotation")
_GET_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_GRAPH = operator.attrgetter("requires_grad", "is_leaf", "retains_grad")
_UNKNOWN = object()
