"""State that a step binds anew: `self.hidden = self.hidden + x`.

The name holds another tensor after each call, so a replay takes its input from what the name holds
when it is called, and binds the name to what it made. A name can hold a tensor, or a tuple of them
(the two states of an LSTM).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.values.value import Storage

from .guards import Change, equal
from .holders import Holder


class Rebound:
    """A name that holds another tensor after the step.

    Args:
        change: what the step changed.
        place: what holds the value alone.

    Attributes:
        place: likewise.
        name: how a program would write it.
        before: the tensors that it held before the step.
        now: those that it holds after it.
        structure: how `now` is nested.
    """

    def __init__(self, change: Change, place: Holder):
        """See the class."""
        self.place, self.name = place, change.name
        self.address = change.address
        self._value = change.before
        leaves, self._nested = _flattened(change.before)
        self.before = list(filter(_is_ours, leaves))
        self.now, self.structure = _flattened(change.now)
        self._kinds = [(_kind(one) if _is_ours(one) else one) for one in leaves]

    def put_back(self) -> None:
        """Let the name hold what it held before the step, and forget that."""
        self.place.put_back([self._value])
        self._value = None
        self.before, self.now = [], []

    def bind(self, leaves: Sequence[Any]) -> None:
        """Let it hold what a replay made."""
        nested = self.structure is not None
        self.place.put_back(
            [pytree.tree_unflatten(list(leaves), self.structure) if nested else leaves[0]]
        )

    def found(self) -> list[lazy_tensor.LazyTensor] | None:
        """The tensors that it holds now; None if they are of another kind than when captured."""
        leaves, nested = _flattened(self.place.read()[0])
        if nested != self._nested:
            return None
        for leaf, kind in zip(leaves, self._kinds, strict=True):
            same = _kind(leaf) == kind if _is_ours(leaf) else leaf is kind or equal(leaf, kind)
            if not same:
                return None
        return list(filter(_is_ours, leaves))


class Rebounds:
    """All names that a step binds anew.

    Args:
        rebound: the names.
        others: memory that the program works on under another name.
        arguments: of the captured call.

    Example:
        >>> Rebounds([], [], []).tensors([])
        []
    """

    def __init__(
        self,
        rebound: Sequence[Rebound],
        others: Iterable[Storage],
        arguments: Sequence[lazy_tensor.LazyTensor],
    ):
        """Remember which of them share memory."""
        self._rebound = list(rebound)
        self._others = {id(storage): storage for storage in others}
        before = [tensor for one in rebound for tensor in one.before]
        self._pattern = self._sharing(before, arguments)

    def tensors(
        self, arguments: Sequence[lazy_tensor.LazyTensor]
    ) -> list[lazy_tensor.LazyTensor] | None:
        """What the names hold now; None if the program does not fit it.

        Args:
            arguments: of the call.
        """
        found: list[lazy_tensor.LazyTensor] = []
        for one in self._rebound:
            tensors = one.found()
            if tensors is None:
                return None
            found += tensors
        return found if self._sharing(found, arguments) == self._pattern else None

    def _sharing(
        self,
        tensors: Sequence[lazy_tensor.LazyTensor],
        arguments: Sequence[lazy_tensor.LazyTensor],
    ) -> list[int] | None:
        """Which tensors share memory with which; None if one does with the program's own."""
        first: dict[int, int] = {}
        storages = [id(tensor._storage) for tensor in (*tensors, *arguments)]
        if not self._others.keys().isdisjoint(storages[: len(tensors)]):
            return None
        return [first.setdefault(storage, number) for number, storage in enumerate(storages)]


def rebound(change: Change, is_outer: Callable[[Any], bool]) -> Rebound | None:
    """A change as what each replay can repeat; None if it cannot.

    Args:
        change: of a name.
        is_outer: whether a tensor was there before the step.
    """
    place = change.holder.single(change.number) if change.number >= 0 else None
    before, nested = _flattened(change.before)
    now, structure = _flattened(change.now)
    if place is None or nested != structure or not any(map(_is_ours, now)):
        return None
    for old, new in zip(before, now, strict=True):
        if not _is_ours(new):
            if not (old is new or equal(old, new)):
                return None
        elif not _is_ours(old) or old.requires_grad or (new.requires_grad and not is_outer(new)):
            return None
    return Rebound(change, place)


def tensors_of(value: Any) -> Iterator[lazy_tensor.LazyTensor]:
    """The tensors of a value that are, or are in tuples."""
    return filter(_is_ours, _flattened(value)[0])


def _flattened(value: Any) -> tuple[list[Any], Any]:
    if not isinstance(value, tuple):
        return [value], None
    return pytree.tree_flatten(value, is_leaf=lambda one: not isinstance(one, tuple))


def _is_ours(value: Any) -> bool:
    return isinstance(value, lazy_tensor.LazyTensor)


def _kind(tensor: lazy_tensor.LazyTensor) -> tuple[Any, ...]:
    """What a program depends on in a tensor, beside its elements."""
    storage = tensor._storage
    return (tensor._aval, tensor._chain, storage.aval, storage.annotation, tensor.requires_grad)
