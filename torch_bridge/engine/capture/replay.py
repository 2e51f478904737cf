"""Run a captured step again: gather inputs, execute one program, store outputs."""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge.engine.compiling import program
from isoshard.torch_bridge.engine.compiling.interrupts import Uninterrupted
from isoshard.torch_bridge.engine.recording import lazy_tensor, random_state
from isoshard.torch_bridge.engine.recording.deferred_checks import Fault, defer
from isoshard.torch_bridge.engine.recording.recipes import Check
from isoshard.torch_bridge.engine.values.symbolic_numbers import Scalars, Table, filled
from isoshard.torch_bridge.engine.values.value import Storage, Value

from .bindings import (
    Argument,
    Bound,
    Computed,
    Gathering,
    Gradient,
    New,
    Owner,
    Place,
    Scene,
    SharedMemory,
    View,
)
from .cpu_ops import HostOps
from .donated_state import StackedMemory
from .guard_sources import Holder
from .guards import Guard
from .side_effects import Rebound, Rebounds
from .step_gradients import held, sealed, stand_in
from .tensor_guards import Description, TensorGuard


@dataclasses.dataclass
class Replay:
    """A captured step.

    Attributes:
        plan: what was compiled.
        program: the executable.
        sources: for each leaf, where it is found: a place, or a constant array.
        targets: which result is written to which place.
        owners: who may have gradients.
        gradients: the owners whose `.grad` the step replaces, and by what.
        dropped: the owners whose gradient the step leaves out.
        made: the tensors made anew.
        table: expressions of the numbers that change.
        scalars: the lifted floats: constants and expressions.
        draws: which random keys the step takes, counted from the state it finds.
        host: CPU operations to repeat (step counters).
        outputs: the step's result, with places, views and `New` for tensors.
        guards: what must be as it was when the step was captured.
        written: where Python keeps numbers that the step computes, and the expressions for them.
        state: the names that the step binds anew, if there are any.
        bound: the same with what they hold after it.
        checks: what refuses lifted floats that change, and the floats it looks at.
        deferred: which of the tensors made are checked after the run, and how.
        turned: the arguments that the step gives another shape in place, and what they become.
    """

    plan: program.CompileRequest
    program: program.Program
    sources: list[Any]
    targets: list[tuple[int, Place]]
    owners: list[Owner]
    gradients: list[tuple[int, Any]]
    dropped: list[int]
    made: list[Computed | SharedMemory]
    table: Table
    scalars: list[Any]
    draws: random_state.Draws
    host: HostOps
    outputs: Any
    guards: tuple[Guard, TensorGuard]
    written: list[tuple[Holder, torch.SymFloat]]
    state: Rebounds | None
    bound: list[tuple[Rebound, list[Any]]]
    checks: list[tuple[Check, list[Any]]]
    deferred: list[tuple[int, Fault]]
    turned: list[tuple[int, Description]]

    def __post_init__(self) -> None:
        """Arrange what each run goes through."""
        self._numbers = Scalars(self.table, self.scalars)
        self._changes = any(callable(read) and not taken for read, taken in self.table.rows)
        self._constants = None if self._changes else self._numbers.array(self.table.values())
        dropping = [self.owners[number] for number in self.dropped]
        fixed = not any(isinstance(owner, Argument) for owner in dropping)
        self._dropping: list[Any] = dropping if fixed else []
        numbers = [*(number for number, _ in self.targets), *(mark.number for mark in self.made)]
        several = frozenset(n for n, times in Counter(numbers).items() if times > 1)
        self._gathering = Gathering(self.plan, self.sources, self.targets, several)
        self.guards[1].keep(self._gathering)
        stays = self._gathering.stays
        written = [(n, place) for n, place in self.targets if id(place) not in stays]
        self._written = [(n, one) for n, one in written if not isinstance(one, StackedMemory)]
        self._stacks = [(n, one) for n, one in written if isinstance(one, StackedMemory)]
        self._leaves, self._structure = pytree.tree_flatten(self.outputs)
        self._is_leaf = len(self._leaves) == 1 and self._leaves[0] is self.outputs

    def fits(self, arguments: list[lazy_tensor.LazyTensor]) -> bool:
        """Whether the step would do the same again, on the same tensors."""
        values, tensors = self.guards
        if not (values.holds() and tensors.holds()):
            return False
        bound = [] if self.state is None else self.state.tensors(arguments)
        return bound is not None and self._gathering.fits(Scene(arguments, self.owners, bound))

    def __call__(self, arguments: list[lazy_tensor.LazyTensor]) -> Any:
        """Run the step on the present values."""
        with Uninterrupted():  # counters, weights and optimizer state move together
            if self.host.ops:
                self.host.repeat()
            return self._run(arguments)

    def run(self, arguments: list[lazy_tensor.LazyTensor]) -> Any:
        """Run the step without repeating its CPU operations."""
        with Uninterrupted():
            return self._run(arguments)

    def _run(self, arguments: list[lazy_tensor.LazyTensor]) -> Any:
        bound = [] if self.state is None else self.state.tensors(arguments) or []
        scene = Scene(arguments, self.owners, bound)
        numbers: Any = self.table.values() if self._changes else None
        for check, floats in self.checks:
            check([filled(scalar, numbers) for scalar in floats])
        scalars = self._constants if numbers is None else self._numbers.array(numbers)
        arrays = self._gathering.arrays(scene)
        values = _Values()
        made = self._make(values)  # before the devices are busy, which slows the host down
        results = program.run(self.program, self.plan, arrays, scalars, self.draws.take())
        del arrays
        layouts = self.program.layouts or ()
        self._gathering.residents.put(results, layouts)
        for number, stack in self._stacks:
            stack.put(results[number], layouts[number])
        values.hold(results, layouts)
        for number, place in self._written:
            scene.storage(place).write(values[number])
        for place, scalar in self.written:
            place.put_back([filled(scalar, numbers)])
        leaves = [_filled(mark, scene, made, numbers) for mark in self._leaves]
        for one, marks in self.bound:
            one.bind([_filled(mark, scene, made) for mark in marks])
        for number, description in self.turned:
            description.give(arguments[number], arguments[number]._storage)
        for number, mark in self.gradients:
            scene.owner(number).grad = _filled(mark, scene, made)
        if self.dropped and (
            self.gradients or not self._dropping or self.guards[1].lacks_gradients
        ):
            self._drop(scene)
        for number, fault in self.deferred:
            defer(made[number], fault)
        return leaves[0] if self._is_leaf else pytree.tree_unflatten(leaves, self._structure)

    def _drop(self, scene: Scene) -> None:
        """Let stand-ins be there for the gradients that were left out."""
        owners = self._dropping or [scene.owner(number) for number in self.dropped]
        if any(map(operator.is_, map(held, owners), repeat(None))):
            for owner in owners:
                if held(owner) is None:
                    owner.grad = stand_in(owner)

    def _make(self, values: _Values) -> list[lazy_tensor.LazyTensor]:
        """The tensors that are new in this run."""
        memories: dict[int, Storage] = {}
        made = []
        for mark in self.made:
            if isinstance(mark, Computed):
                tensor = lazy_tensor.fresh(mark.aval, values[mark.number])
                made.append(sealed(tensor) if mark.differentiable else tensor)
                continue
            memory = memories.get(mark.memory)
            if memory is None:
                memory = memories[mark.memory] = Storage(values[mark.number], mark.whole)
            tensor = lazy_tensor.new_tensor(mark.aval, memory, mark.chain, mark.offset)
            made.append(sealed(tensor) if mark.differentiable else tensor)
        return made


class _Values:
    """The results of a run that are looked at one by one: one value for one result."""

    def __init__(self):
        """See the class."""
        self._made: dict[int, Value] = {}
        self._results: Sequence[Any] = ()
        self._layouts: Sequence[int] = ()

    def __getitem__(self, number: int) -> Value:
        value = self._made.get(number)
        if value is None:
            value = self._made[number] = Value()
            if self._results:
                value.array, value.layout = self._results[number], self._layouts[number]
        return value

    def hold(self, results: Sequence[Any], layouts: Sequence[int]) -> None:
        """The program ran: values have their arrays.

        Args:
            results: the arrays.
            layouts: of each.
        """
        self._results, self._layouts = results, layouts
        for number, value in self._made.items():
            value.array, value.layout = results[number], layouts[number]


def _filled(
    mark: Any,
    scene: Scene,
    made: Sequence[lazy_tensor.LazyTensor],
    numbers: Any = None,
) -> Any:
    """The tensor or float of a run that a mark stands for; anything else stands for itself."""
    if isinstance(mark, New):
        return made[mark.number]
    if isinstance(mark, Argument | Bound | Gradient):
        return scene.tensor(mark)
    if isinstance(mark, View):
        storage = scene.storage(mark.place)
        tensor = lazy_tensor.new_tensor(mark.aval, storage, mark.chain, mark.offset)
        return sealed(tensor) if mark.differentiable else tensor
    if isinstance(mark, torch.SymFloat) and numbers is not None:
        return filled(mark, numbers)
    return mark
