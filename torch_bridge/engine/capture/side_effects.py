"""Side effects of a step in Python: counters, flags, caches, floats, names bound to other tensors.

A replay runs no Python code, so a step that counts in an attribute must not be replayed.
`SideEffects` stores the values of all objects that the step can reach before it runs, reports
afterwards what changed, and can restore everything.

>>> import types
>>> trainer = types.SimpleNamespace(calls=0)
>>> walk = ObjectWalk()
>>> walk.walk(trainer, "trainer")
>>> effects = SideEffects(walk)
>>> trainer.calls += 1
>>> [change.text for change in effects.changes()]
['trainer.calls was 0 and is 1']
>>> effects.restore()
>>> trainer.calls
0

Two kinds of side effects are repeated by a replay. A float that is an input of the program (a
learning rate, or a float that changed between calls) is a symbol during the capture
(`symbolic_numbers`), and what the step makes of it, an attribute that it multiplies by 0.99, is
written back after each replay:

>>> from isoshard.torch_bridge.engine.capture.guard_sources import Names
>>> trainer = types.SimpleNamespace(beta=0.5)
>>> table = Table()
>>> floats = FloatInputs(table, [Names(vars(trainer), ("beta",), "trainer.")])
>>> with floats:
...     trainer.beta = trainer.beta * 0.5
>>> floats.settle([])
>>> trainer.beta, floats.written[0][1].node.value
(0.25, 0.25)

A name that the step binds to another tensor (`self.hidden = self.hidden + x`), or to a tuple of
tensors as the two states of an LSTM, is a `Rebinding`: a replay takes its input from the tensor
that the name has when it is called, and binds the name to the tensor that it computed.
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

from .executed_code import ExecutedCode
from .guard_sources import MISSING, Count, Items, Names, Source
from .guards import Change, changes, equal
from .object_walk import ObjectWalk
from .step_gradients import raw_gradient


class FloatInputs:
    """Context in which some floats of Python state are symbols.

    Args:
        table: the expressions of the step.
        sources: sources of one float each.

    Attributes:
        written: sources to which the step assigned an expression of symbols, and the expression.
    """

    def __init__(self, table: Table, sources: Sequence[Source]):
        """See the class."""
        self._table = table
        self._sources = sources
        self._symbols: list[tuple[Source, float, torch.SymFloat]] = []
        self.written: list[tuple[Source, torch.SymFloat]] = []

    def __enter__(self) -> None:
        """Replace the floats by symbols."""
        for source in self._sources:
            value = settled(source.read()[0])
            if type(value) is float:
                symbol = self._table.symbol(
                    functools.partial(_current_float, source),
                    value,
                    is_integer=isinstance(source, Count),
                )
                self._symbols.append((source, value, symbol))
                source.restore([symbol])

    def __exit__(self, *exc: object) -> None:
        """Restore the floats that the step has not assigned."""
        for source, value, symbol in self._symbols:
            if source.read()[0] is symbol:
                source.restore([value])

    def settle(self, sources: Iterable[Source]) -> None:
        """Replace the expressions that the step assigned by their current values.

        Args:
            sources: where they may be, besides the sources of the floats themselves.
        """
        for source in (*self._sources, *sources):
            for index, value in enumerate(source.read()):
                is_ours = isinstance(value, torch.SymFloat) and value.node.table is self._table
                assigned = source.select(index) if is_ours else None
                if assigned is not None:
                    self.written.append((assigned, value))
                    assigned.restore([value.node.value])

    def restore(self) -> None:
        """Restore all floats."""
        for source, value, _ in self._symbols:
            source.restore([value])

    def inputs(self) -> frozenset[tuple[int, Any]]:
        """The keys of the floats that were symbols."""
        return frozenset(source.key(0) for source, _, _ in self._symbols)

    def outputs(self) -> frozenset[tuple[int, Any]]:
        """The keys of the values that a replay writes."""
        return frozenset(source.key(0) for source, _ in self.written)


def _current_float(source: Source) -> float:
    return float(settled(source.read()[0]))


def groups_of(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[dict[str, Any]]:
    """Every parameter group of every optimizer."""
    for optimizer in optimizers:
        yield from optimizer.param_groups


class TrainingState:
    """Gradients, optimizer state, scalers and step counts from before a step.

    Args:
        current_tensors: the objects behind the step.
        owners: every tensor that may have a gradient.
    """

    def __init__(self, walk: ObjectWalk, owners: Sequence[torch.Tensor]):
        """See the class."""
        self.gradients: list[tuple[torch.Tensor, Any]] = []
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._states: list[tuple[torch.optim.Optimizer, dict[Any, Any]]] = []
        self._scalers: list[tuple[Any, dict[Any, Any]]] = []
        self._counters: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.include(owners, walk.optimizers, walk.scalers)

    def include(
        self,
        owners: Iterable[torch.Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        scalers: Iterable[Any],
    ) -> None:
        """Save more, which the step has not changed so far."""
        self.gradients += [(owner, raw_gradient(owner)) for owner in owners]
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
            for _, saved in states
            for _, state in saved.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter)
        ]

    def restore(self) -> None:
        """Restore everything."""
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
        """Restore the per-optimizer states of gradient scalers."""
        for scaler, states in self._scalers:
            scaler_states(scaler).clear()
            scaler_states(scaler).update({key: dict(s) for key, s in states.items()})

    def restore_gradients(self) -> None:
        """Restore the gradients."""
        for owner, gradient in self.gradients:
            owner.grad = gradient

    def restore_counters(self) -> None:
        """Restore the CPU tensors of optimizer state."""
        with torch.no_grad():
            for value, before in self._counters:
                value.copy_(before)


class Rebinding:
    """A name that the step binds to other tensors.

    Args:
        change: the change of its value.
        source: the source of this value alone.

    Attributes:
        source: the same.
        name: its expression in user code.
        key: `Source.key` of the value.
        before: its tensors before the step.
        now: its leaves after the step.
        structure: the pytree structure of `now`; None of a single leaf.
    """

    def __init__(self, change: Change, source: Source):
        """See the class."""
        self.source, self.name = source, change.name
        self.key = change.key
        self._value = change.before
        leaves, self._nested = _flattened(change.before)
        self.before = list(filter(_is_lazy, leaves))
        self.now, self.structure = _flattened(change.now)
        self._expected = [(_metadata(leaf) if _is_lazy(leaf) else leaf) for leaf in leaves]

    def restore(self) -> None:
        """Bind the name to its value from before the step, and drop that."""
        self.source.restore([self._value])
        self._value = None
        self.before, self.now = [], []

    def bind(self, leaves: Sequence[Any]) -> None:
        """Bind the name to the results of a replay."""
        nested = self.structure is not None
        self.source.restore(
            [pytree.tree_unflatten(list(leaves), self.structure) if nested else leaves[0]]
        )

    def current_tensors(self) -> list[lazy_tensor.LazyTensor] | None:
        """The current tensors; None if their metadata is not as when captured."""
        leaves, nested = _flattened(self.source.read()[0])
        if nested != self._nested:
            return None
        for leaf, expected in zip(leaves, self._expected, strict=True):
            matches = (
                _metadata(leaf) == expected
                if _is_lazy(leaf)
                else leaf is expected or equal(leaf, expected)
            )
            if not matches:
                return None
        return list(filter(_is_lazy, leaves))


class Rebindings:
    """All names that a step rebinds.

    Args:
        rebindings: the names.
        owned: storages that the program reads or writes by other bindings.
        arguments: of the captured call.

    Example:
        >>> Rebindings([], [], []).tensors([])
        []
    """

    def __init__(
        self,
        rebindings: Sequence[Rebinding],
        owned: Iterable[Storage],
        arguments: Sequence[lazy_tensor.LazyTensor],
    ):
        """See the class."""
        self._rebindings = list(rebindings)
        self._owned = {id(storage): storage for storage in owned}
        before = [tensor for rebinding in rebindings for tensor in rebinding.before]
        self._pattern = self._sharing(before, arguments)

    def tensors(
        self, arguments: Sequence[lazy_tensor.LazyTensor]
    ) -> list[lazy_tensor.LazyTensor] | None:
        """The current tensors of all names; None if the program does not fit them."""
        current: list[lazy_tensor.LazyTensor] = []
        for rebinding in self._rebindings:
            tensors = rebinding.current_tensors()
            if tensors is None:
                return None
            current += tensors
        return current if self._sharing(current, arguments) == self._pattern else None

    def _sharing(
        self,
        tensors: Sequence[lazy_tensor.LazyTensor],
        arguments: Sequence[lazy_tensor.LazyTensor],
    ) -> list[int] | None:
        """Which tensors share storages; None if one shares a storage of the program."""
        first: dict[int, int] = {}
        storages = [id(tensor._storage) for tensor in (*tensors, *arguments)]
        if not self._owned.keys().isdisjoint(storages[: len(tensors)]):
            return None
        return [first.setdefault(storage, index) for index, storage in enumerate(storages)]


def rebinding_of(change: Change, is_outer: Callable[[Any], bool]) -> Rebinding | None:
    """A change as a rebinding that a replay repeats; None if it is none."""
    source = change.single_source
    before, nested = _flattened(change.before)
    now, structure = _flattened(change.now)
    if source is None or nested != structure or not any(map(_is_lazy, now)):
        return None
    for old, new in zip(before, now, strict=True):
        if not _is_lazy(new):
            if not (old is new or equal(old, new)):
                return None
        elif not _is_lazy(old) or old.requires_grad or (new.requires_grad and not is_outer(new)):
            return None
    return Rebinding(change, source)


def tensors_of(value: Any) -> Iterator[lazy_tensor.LazyTensor]:
    """The tensors of a value that is a tensor, or a tuple of them."""
    return filter(_is_lazy, _flattened(value)[0])


def _flattened(value: Any) -> tuple[list[Any], Any]:
    if not isinstance(value, tuple):
        return [value], None
    return pytree.tree_flatten(value, is_leaf=lambda item: not isinstance(item, tuple))


def _is_lazy(value: Any) -> bool:
    return isinstance(value, lazy_tensor.LazyTensor)


def _metadata(tensor: lazy_tensor.LazyTensor) -> tuple[Any, ...]:
    """What a program depends on in a tensor besides its elements."""
    storage = tensor._storage
    return (tensor._aval, tensor._chain, storage.aval, storage.annotation, tensor.requires_grad)


class SideEffects:
    """The Python values from before a step, and what it changed of them.

    Args:
        walk: the objects that the step can reach.
    """

    def __init__(self, walk: ObjectWalk):
        """Store the current values."""
        self._walk = walk
        self._sources: list[Source] = []
        self._values: list[list[Any]] = []
        self.include_new()

    def include_new(self) -> None:
        """Store the values of objects that the walk added and the step has not changed yet."""
        new = self._walk.sources[len(self._sources) :]
        self._sources += new
        self._values += [list(map(present, source.read())) for source in new]

    def counts(self) -> Iterator[Count]:
        """The ints in an optimizer's state that the step changed, or initialized."""
        for change in self.changes():
            for optimizer in self._walk.optimizers:
                states = [state for state in optimizer.state.values() if isinstance(state, dict)]
                is_new = change.source.base is optimizer.state and isinstance(change.now, dict)
                for state in [change.now] if is_new else states:
                    if state is change.now:
                        keys = list(state)
                    elif state is change.source.base:
                        keys = [change.key[1]]
                    else:
                        continue
                    for key in keys:
                        if type(state.get(key)) is int:
                            yield Count(state, (key,), change.name)

    def changes(self) -> Iterator[Change]:
        """The values that changed."""
        for source, before in zip(self._sources, self._values, strict=True):
            yield from changes(source, before)

    def classify(
        self,
        executed: ExecutedCode,
        is_outer: Callable[[Any], bool],
        written: Container[tuple[int, Any]] = (),
    ) -> tuple[Change | None, list[Rebinding]]:
        """The first change that a replay cannot repeat, or None; and the rebindings.

        Ignored are state that an optimizer initializes, which remains, and names that the step
        assigns without reading them: it would assign the same value again.
        """
        rebindings: list[Rebinding] = []
        for change in self.changes():
            if change.key in written or self._is_repeated(change, executed):
                continue
            rebinding = rebinding_of(change, is_outer)
            if rebinding is None:
                return change, []
            rebindings.append(rebinding)
        return None, rebindings

    def restore_tensors(self, is_outer: Callable[[Any], bool]) -> None:
        """Restore the names that have a tensor which the step created."""
        for change in self.changes():
            source = change.single_source
            if source is not None and not self._is_optimizer_state(change.source):
                if not all(map(is_outer, tensors_of(change.now))):
                    source.restore([change.before])

    def restore(self) -> None:
        """Restore every object, except the state that optimizers initialized."""
        for source, before in zip(self._sources, self._values, strict=True):
            if next(changes(source, before), None) and not self._is_optimizer_state(source):
                source.restore(before)

    def _is_repeated(self, change: Change, executed: ExecutedCode) -> bool:
        source, now = change.source, change.now
        if isinstance(source, Names):
            key = change.name[len(source.path) :]
            if key in executed.only_stored and not _holds_a_tensor(now):
                return True
        if any(vars(scaler) is source.base for scaler in self._walk.scalers):
            return isinstance(now, torch.Tensor)
        return self._is_optimizer_state(source) and _is_new_state(source, change)

    def _is_optimizer_state(self, source: Source) -> bool:
        """Whether it is the source of an optimizer's state."""
        return any(optimizer.state is source.base for optimizer in self._walk.optimizers)


def _holds_a_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def _is_new_state(source: Source, change: Change) -> bool:
    """Whether an optimizer initialized the state of a parameter, of tensors only."""
    if change.before is not MISSING or not isinstance(source, Items):
        return False
    if isinstance(change.now, dict):
        return all(isinstance(value, torch.Tensor) for value in change.now.values())
    return isinstance(change.now, torch.Tensor)
