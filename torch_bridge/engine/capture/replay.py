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
from isoshard.torch_bridge.engine.recording.deferred_checks import CountCheck, defer
from isoshard.torch_bridge.engine.recording.recipes import Check
from isoshard.torch_bridge.engine.values.symbolic_numbers import Scalars, Table, filled
from isoshard.torch_bridge.engine.values.value import Storage, Value

from .bindings import (
    Argument,
    Binding,
    CallTensors,
    Computed,
    Gradient,
    Inputs,
    NewTensor,
    Owner,
    SharedStorage,
    StateTensor,
    View,
)
from .cpu_ops import CpuOps
from .donated_state import StackedState
from .guard_sources import Source
from .guards import Guard
from .side_effects import Rebinding, Rebindings
from .step_gradients import dropped_gradient, raise_in_backward, raw_gradient
from .tensor_guards import TensorGuard, TensorMetadata


@dataclasses.dataclass
class Replay:
    """A captured step.

    Attributes:
        plan: what was compiled.
        program: the executable.
        inputs: of each input of the program, its binding or a constant array.
        targets: results of the program and the bindings that they are written to.
        owners: the tensors that may have gradients.
        gradients: the owners whose `.grad` the step replaces, and a reference to the new one.
        dropped: the owners whose gradient the program does not return.
        new_tensors: the tensors that each run creates.
        table: the expressions of symbolic floats.
        scalars: the lifted floats: constants and expressions.
        draws: the random keys that the step takes, relative to the current random states.
        cpu_ops: CPU operations to replay (step counts).
        outputs: the result of the step, with references for its tensors.
        guards: on values and on tensors.
        written_floats: sources of floats that the step assigns, and their expressions.
        rebindings: the names that the step rebinds, if any.
        rebound: each of them with references to its new value.
        checks: checks of lifted floats, and the floats of each.
        deferred: new tensors that are checked after the run, and the check.
        changed_arguments: the arguments whose metadata the step changes, and the new metadata.
        printed: the lines that it prints, and which of the new tensors are in each.
    """

    plan: program.CompileRequest
    program: program.Program
    inputs: list[Any]
    targets: list[tuple[int, Binding]]
    owners: list[Owner]
    gradients: list[tuple[int, Any]]
    dropped: list[int]
    new_tensors: list[Computed | SharedStorage]
    table: Table
    scalars: list[Any]
    draws: random_state.Draws
    cpu_ops: CpuOps
    outputs: Any
    guards: tuple[Guard, TensorGuard]
    written_floats: list[tuple[Source, torch.SymFloat]]
    rebindings: Rebindings | None
    rebound: list[tuple[Rebinding, list[Any]]]
    checks: list[tuple[Check, list[Any]]]
    deferred: list[tuple[int, CountCheck]]
    changed_arguments: list[tuple[int, TensorMetadata]]
    printed: list[tuple[Any, list[int]]]

    def __post_init__(self) -> None:
        """Precompute what all runs share."""
        self._scalars = Scalars(self.table, self.scalars)
        self._has_symbols = any(callable(read) and not taken for read, taken in self.table.rows)
        self._checks = [(check, Scalars(self.table, floats)) for check, floats in self.checks]
        self._constant_scalars: Any = None
        if not self._has_symbols:
            self._constant_scalars = self._scalars.array(self.table.values())
        owners = [self.owners[index] for index in self.dropped]
        fixed = not any(isinstance(owner, Argument) for owner in owners)
        self._dropped_owners: list[Any] = owners if fixed else []
        results = [
            *(index for index, _ in self.targets),
            *(ref.index for ref in self.new_tensors),
        ]
        shared_results = frozenset(n for n, times in Counter(results).items() if times > 1)
        self._inputs = Inputs(self.plan, self.inputs, self.targets, shared_results)
        self.guards[1].set_owned(self._inputs)
        owned = self._inputs.owned
        written = [(n, binding) for n, binding in self.targets if id(binding) not in owned]
        self._written = [
            (n, binding) for n, binding in written if not isinstance(binding, StackedState)
        ]
        self._stacks = [(n, binding) for n, binding in written if isinstance(binding, StackedState)]
        self._leaves, self._structure = pytree.tree_flatten(self.outputs)
        self._is_leaf = len(self._leaves) == 1 and self._leaves[0] is self.outputs

    def fits(self, arguments: list[lazy_tensor.LazyTensor]) -> bool:
        """Whether a replay is equivalent to running the step."""
        values, tensors = self.guards
        if not (values.check() and tensors.check()):
            return False
        rebound = [] if self.rebindings is None else self.rebindings.tensors(arguments)
        return rebound is not None and self._inputs.fits(
            CallTensors(arguments, self.owners, rebound)
        )

    def __call__(self, arguments: list[lazy_tensor.LazyTensor]) -> Any:
        """Run the step on the current values."""
        with Uninterrupted():  # counters, weights and optimizer state move together
            if self.cpu_ops.ops:
                self.cpu_ops.replay()
            return self._run(arguments)

    def run(self, arguments: list[lazy_tensor.LazyTensor]) -> Any:
        """Run the step without its CPU operations."""
        with Uninterrupted():
            return self._run(arguments)

    def _run(self, arguments: list[lazy_tensor.LazyTensor]) -> Any:
        rebound = [] if self.rebindings is None else self.rebindings.tensors(arguments) or []
        call = CallTensors(arguments, self.owners, rebound)
        expressions: Any = self.table.values() if self._has_symbols else None
        for check, floats in self._checks:
            check(floats.numbers(expressions))
        scalars = (
            self._constant_scalars if expressions is None else self._scalars.array(expressions)
        )
        arrays = self._inputs.arrays(call)
        values = _Results()
        new_tensors = self._create(values)  # busy devices slow the host down
        results = program.run(self.program, self.plan, arrays, scalars, self.draws.take())
        del arrays
        layouts = self.program.layouts or ()
        self._inputs.state.put(results, layouts)
        for index, stack in self._stacks:
            stack.put(results[index], layouts[index])
        values.set_results(results, layouts)
        for index, binding in self._written:
            call.storage(binding).write(values[index])
        for binding, scalar in self.written_floats:
            binding.restore([filled(scalar, expressions)])
        leaves = [_resolved(ref, call, new_tensors, expressions) for ref in self._leaves]
        for rebinding, refs in self.rebound:
            rebinding.bind([_resolved(ref, call, new_tensors) for ref in refs])
        for index, metadata in self.changed_arguments:
            metadata.apply_to(arguments[index], arguments[index]._storage)
        for index, ref in self.gradients:
            call.owner(index).grad = _resolved(ref, call, new_tensors)
        if self.dropped and (
            self.gradients or not self._dropped_owners or self.guards[1].misses_gradients
        ):
            self._drop(call)
        for index, error_of in self.deferred:
            defer(new_tensors[index], error_of)
        for line, indices in self.printed:
            line.show([new_tensors[index] for index in indices])
        return leaves[0] if self._is_leaf else pytree.tree_unflatten(leaves, self._structure)

    def _drop(self, call: CallTensors) -> None:
        """Set the dropped gradients where there is none."""
        owners = self._dropped_owners or [call.owner(index) for index in self.dropped]
        if any(map(operator.is_, map(raw_gradient, owners), repeat(None))):
            for owner in owners:
                if raw_gradient(owner) is None:
                    owner.grad = dropped_gradient(owner)

    def _create(self, values: _Results) -> list[lazy_tensor.LazyTensor]:
        """Create the new tensors of a run."""
        storages: dict[int, Storage] = {}
        new_tensors = []
        for ref in self.new_tensors:
            if isinstance(ref, Computed):
                tensor = lazy_tensor.fresh(ref.aval, values[ref.index])
            else:
                storage = storages.get(ref.memory)
                if storage is None:
                    storage = storages[ref.memory] = Storage(values[ref.index], ref.storage_aval)
                tensor = lazy_tensor.new_tensor(ref.aval, storage, ref.chain, ref.offset)
            new_tensors.append(raise_in_backward(tensor) if ref.differentiable else tensor)
        return new_tensors


class _Results:
    """The values of a run's results, created when first used."""

    def __init__(self):
        """See the class."""
        self._values: dict[int, Value] = {}
        self._results: Sequence[Any] = ()
        self._layouts: Sequence[int] = ()

    def __getitem__(self, index: int) -> Value:
        value = self._values.get(index)
        if value is None:
            value = self._values[index] = Value()
            if self._results:
                value.array, value.layout = self._results[index], self._layouts[index]
        return value

    def set_results(self, results: Sequence[Any], layouts: Sequence[int]) -> None:
        """Set the arrays and layouts of all values, after the program ran."""
        self._results, self._layouts = results, layouts
        for index, value in self._values.items():
            value.array, value.layout = results[index], layouts[index]


def _resolved(
    ref: Any,
    call: CallTensors,
    new_tensors: Sequence[lazy_tensor.LazyTensor],
    expressions: Any = None,
) -> Any:
    """The tensor or float of a run for a reference; anything else is itself."""
    if isinstance(ref, NewTensor):
        return new_tensors[ref.index]
    if isinstance(ref, Argument | StateTensor | Gradient):
        return call.tensor(ref)
    if isinstance(ref, View):
        storage = call.storage(ref.binding)
        tensor = lazy_tensor.new_tensor(ref.aval, storage, ref.chain, ref.offset)
        return raise_in_backward(tensor) if ref.differentiable else tensor
    if isinstance(ref, torch.SymFloat) and expressions is not None:
        return filled(ref, expressions)
    return ref
