"""Side effects of a step in Python: counters, flags, caches, floats, names bound to other tensors.

A replay runs no Python code, so a step that counts in an attribute must not be replayed. `Effects`
stores what the objects behind a step hold before it runs, reports afterwards what changed, and can
restore everything.

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

Two kinds of side effects are repeated by a replay. A float that is an input of the program (a
learning rate, or a float that changed between calls) is a symbol during the capture
(`symbolic_numbers`), and what the step makes of it, an attribute that it multiplies by 0.99, is
written back after each replay:

>>> from isoshard.torch_bridge.engine.capture.guard_sources import Names
>>> trainer = types.SimpleNamespace(beta=0.5)
>>> table = Table()
>>> numbers = Numbers(table, [Names(vars(trainer), ("beta",), "trainer.")])
>>> with numbers:
...     trainer.beta = trainer.beta * 0.5
>>> numbers.settle([])
>>> trainer.beta, numbers.written[0][1].node.value
(0.25, 0.25)

A name that the step binds to another tensor (`self.hidden = self.hidden + x`), or to a tuple of
tensors as the two states of an LSTM, is a `Rebound`: a replay takes its input from the tensor that
the name has when it is called, and binds the name to the tensor that it computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge._torch_internals.module_fields import scaler_states
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.values.symbolic_numbers import Table, present, settled
from isoshard.torch_bridge.engine.values.value import Storage

from .executed_code import Executed
from .guard_sources import MISSING, Holder, Items, Names
from .guards import Change, changes, equal
from .object_walk import Reachable
from .step_gradients import held


class Numbers:
    """Context in which numbers are symbols where Python keeps them.

    Args:
        table: where expressions are kept.
        places: holders of one float each.

    Attributes:
        written: holders to which the step gave an expression of symbols, and the expression.
    """

    def __init__(self, table: Table, places: Sequence[Holder]):
        """See the class."""
        self._table = table
        self._places = places
        self._symbols: list[tuple[Holder, float, torch.SymFloat]] = []
        self.written: list[tuple[Holder, torch.SymFloat]] = []

    def __enter__(self) -> None:
        """Put symbols there."""
        for place in self._places:
            value = settled(place.read()[0])
            if type(value) is float:
                symbol = self._table.symbol(functools.partial(_present, place), value)
                self._symbols.append((place, value, symbol))
                place.put_back([symbol])

    def __exit__(self, *exc: object) -> None:
        """Put the numbers back where the step left them alone."""
        for place, value, symbol in self._symbols:
            if place.read()[0] is symbol:
                place.put_back([value])

    def settle(self, holders: Iterable[Holder]) -> None:
        """Replace the expressions that the step put somewhere by their present values.

        Args:
            holders: where they may be, besides the places of the numbers themselves.
        """
        for holder in (*self._places, *holders):
            for number, value in enumerate(holder.read()):
                mine = isinstance(value, torch.SymFloat) and value.node.table is self._table
                place = holder.single(number) if mine else None
                if place is not None:
                    self.written.append((place, value))
                    place.put_back([value.node.value])

    def put_back(self) -> None:
        """Let Python hold the numbers that it held before the step."""
        for place, value, _ in self._symbols:
            place.put_back([value])

    def inputs(self) -> frozenset[tuple[int, Any]]:
        """The addresses of the numbers that were symbols."""
        return frozenset(place.address(0) for place, _, _ in self._symbols)

    def outputs(self) -> frozenset[tuple[int, Any]]:
        """The addresses to which a replay writes."""
        return frozenset(place.address(0) for place, _ in self.written)


def _present(place: Holder) -> float:
    return float(settled(place.read()[0]))


def groups_of(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[dict[str, Any]]:
    """Every parameter group of every optimizer."""
    for optimizer in optimizers:
        yield from optimizer.param_groups


class Snapshot:
    """What a refused step must find again: gradients, optimizer state, step counters.

    Args:
        found: the objects behind the step.
        owners: every tensor that may have a gradient.
    """

    def __init__(self, found: Reachable, owners: Sequence[torch.Tensor]):
        """See the class."""
        self.gradients: list[tuple[torch.Tensor, Any]] = []
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._states: list[tuple[torch.optim.Optimizer, dict[Any, Any]]] = []
        self._scalers: list[tuple[Any, dict[Any, Any]]] = []
        self._counters: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.include(owners, found.optimizers, found.scalers)

    def include(
        self,
        owners: Iterable[torch.Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        scalers: Iterable[Any],
    ) -> None:
        """Remember more, which the step has not changed so far."""
        self.gradients += [(owner, held(owner)) for owner in owners]
        self._groups += [
            (group, {name: value for name, value in group.items() if name != "params"})
            for group in groups_of(optimizers)
        ]
        states = [
            (optimizer, {key: (state, dict(state)) for key, state in optimizer.state.items()})
            for optimizer in optimizers
        ]
        self._states += states
        self._scalers += [
            (scaler, {key: dict(state) for key, state in scaler_states(scaler).items()})
            for scaler in scalers
            if scaler.is_enabled()
        ]
        self._counters += [
            (value, value.clone())
            for _, known in states
            for _, state in known.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter)
        ]

    def restore(self) -> None:
        """Put everything back."""
        self.restore_gradients()
        for group, values in self._groups:
            group.update(values)
        for optimizer, states in self._states:
            optimizer.state.clear()
            for key, (state, values) in states.items():
                state.clear()
                state.update(values)
                optimizer.state[key] = state
        self.restore_scalers()
        self.restore_counters()

    def restore_scalers(self) -> None:
        """Let gradient scalers have unscaled what they had."""
        for scaler, states in self._scalers:
            scaler_states(scaler).clear()
            scaler_states(scaler).update({key: dict(s) for key, s in states.items()})

    def restore_gradients(self) -> None:
        """Put the gradients back."""
        for owner, gradient in self.gradients:
            owner.grad = gradient

    def restore_counters(self) -> None:
        """Put the CPU tensors of optimizer state back to their values."""
        with torch.no_grad():
            for value, before in self._counters:
                value.copy_(before)


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
