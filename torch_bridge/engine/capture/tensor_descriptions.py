"""What a step changes of tensors themselves: shapes in place, and whether they require a gradient.

`x.unsqueeze_(0)`, `x.resize_(4)`, `x.data = ..` and `x.requires_grad_()` change the tensor and no
memory, so no program repeats them. A replay does it to its arguments; a step that changes another
tensor so is not replayed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.values.value import Aval, Storage
from isoshard.torch_bridge.engine.values.views import Chain


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
