"""Bindings: where a captured program finds its inputs, and where its results go.

A replay runs no Python code of the step, so what the step touched is recorded once: an input is the
storage of an argument, of a gradient, or a `Storage` that outlives the step; a result is written to
such a storage, or becomes a new tensor.

`Inputs` gathers the inputs of each run. Arrays that the step owns (`donated_state`) are at hand.
For all others one check in C tests whether every value has the sharding that the program takes and
no other reference; only inputs that fail it are prepared one by one.
"""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.runtime import metrics
from isoshard.core.runtime.caches import cached
from isoshard.torch_bridge.engine.compiling import input_placement, program
from isoshard.torch_bridge.engine.compiling.padded_blocks import has_blocks, padded
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.memory_log import visible
from isoshard.torch_bridge.engine.recording.recorder import materialize
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.engine.values.value import Aval, Storage, Value
from isoshard.torch_bridge.engine.values.views import Chain

from .donated_state import OwnedState, StackedState, peek, raw_value


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of the step, or its storage.

    Attributes:
        index: which tensor argument, in flattened order.
    """

    index: int


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The `.grad` of an owner before the step, or its storage.

    Attributes:
        index: which owner.
    """

    index: int


@dataclasses.dataclass(frozen=True)
class StateTensor:
    """An earlier tensor of a name that the step rebinds, or its storage.

    Attributes:
        index: among these tensors.
    """

    index: int


@dataclasses.dataclass(frozen=True)
class CpuOperand:
    """A CPU tensor that is uploaded in each run.

    Attributes:
        read: returns the tensor.
    """

    read: Callable[[], torch.Tensor]


Binding = Argument | Gradient | StateTensor | Storage


@dataclasses.dataclass(frozen=True)
class View:
    """A tensor that views a storage of the caller.

    Attributes:
        binding: whose storage.
        aval: its size, stride and dtype.
        chain: its view of the storage.
        offset: its storage offset.
        differentiable: whether it came out of the step with an autograd graph.
    """

    binding: Argument | Gradient | StateTensor
    aval: Aval
    chain: Chain
    offset: int
    differentiable: bool


@dataclasses.dataclass(frozen=True)
class Computed:
    """A tensor that each run creates with a storage of its own.

    Attributes:
        index: which result of the program.
        aval: its size, stride and dtype.
        differentiable: whether it came out of the step with an autograd graph.
    """

    index: int
    aval: Aval
    differentiable: bool


@dataclasses.dataclass(frozen=True)
class SharedStorage:
    """A tensor that each run creates in a storage that others of the run share.

    Attributes:
        memory: which storage of the run.
        index: the result of the program that is the storage.
        storage_aval: the aval of the storage.
        aval: the tensor's size, stride and dtype.
        chain: its view of the storage.
        offset: its storage offset.
        differentiable: whether it came out of the step with an autograd graph.
    """

    memory: int
    index: int
    storage_aval: Aval
    aval: Aval
    chain: Chain
    offset: int
    differentiable: bool


@dataclasses.dataclass(frozen=True)
class NewTensor:
    """A tensor that each run creates, `Computed` or `SharedStorage`.

    Attributes:
        index: among the new tensors.
    """

    index: int


Owner = torch.Tensor | Argument
"""A tensor that may have a gradient: a parameter, or an argument that requires one."""


class CallTensors:
    """The tensors of one call, by binding.

    Args:
        arguments: the call's tensor arguments.
        owners: the tensors that may have gradients.
        rebound: the current tensors of the names that the step rebinds.
    """

    def __init__(
        self,
        arguments: Sequence[lazy_tensor.LazyTensor],
        owners: Sequence[Owner],
        rebound: Sequence[lazy_tensor.LazyTensor],
    ):
        """See the class."""
        self.arguments = arguments
        self._rebound = rebound
        self._owners = owners
        self._gradients: dict[int, Any] = {}

    def owner(self, index: int) -> torch.Tensor:
        """An owner of a gradient."""
        owner = self._owners[index]
        return self.arguments[owner.index] if isinstance(owner, Argument) else owner

    def tensor(self, binding: Argument | Gradient | StateTensor) -> Any:
        """The tensor of a binding; a gradient is read once."""
        if isinstance(binding, Argument):
            return self.arguments[binding.index]
        if isinstance(binding, StateTensor):
            return self._rebound[binding.index]
        if binding.index not in self._gradients:
            self._gradients[binding.index] = self.owner(binding.index).grad
        return self._gradients[binding.index]

    def storage(self, binding: Binding) -> Storage:
        """The storage of a binding."""
        return binding if isinstance(binding, Storage) else self.tensor(binding)._storage


class Inputs:
    """The inputs of a program.

    Args:
        plan: of the program.
        inputs: of each input, its binding or a constant array.
        targets: results of the program and the bindings that they are written to.
        shared_results: the results that are written to several bindings.

    Attributes:
        state: the storages that the step owns.
        owned: their ids.
    """

    def __init__(
        self,
        plan: program.CompileRequest,
        inputs: Sequence[Any],
        targets: Sequence[tuple[int, Any]],
        shared_results: Container[int],
    ):
        """Group the inputs by how they are gathered."""
        self._plan = plan
        self._in_blocks = has_blocks(plan.placed)
        self._other_inputs = [  # in order of position, to be inserted
            (position, binding)
            for position, binding in enumerate(inputs)
            if isinstance(binding, jax.Array | UnevenArray | CpuOperand | StackedState)
        ]
        self._stacks = [
            binding for _, binding in self._other_inputs if isinstance(binding, StackedState)
        ]
        stacked = [storage for stack in self._stacks for storage in stack.storages]
        self._stacked = frozenset(map(id, stacked))
        other_positions = {position for position, _ in self._other_inputs}
        written = {id(binding): index for index, binding in targets if index not in shared_results}
        owned = {
            id(binding): position
            for position, binding in enumerate(inputs)
            if isinstance(binding, Storage) and id(binding) in written
        }
        self.owned = frozenset(owned)
        owned_positions = owned.values()
        self.state = OwnedState(
            [inputs[position] for position in owned_positions],
            [plan.placed[position] for position in owned_positions],
            [written[key] for key in owned],
        )
        others = [
            n
            for n in range(len(inputs))
            if n not in other_positions and n not in {*owned_positions}
        ]
        read_only = [n for n in others if isinstance(inputs[n], Storage)]
        per_call = [n for n in others if not isinstance(inputs[n], Storage)]
        donated = set(plan.donated)
        self._storages = [inputs[position] for position in read_only]
        self._layouts = [plan.placed[position] for position in read_only]
        self._donated = [n for n, position in enumerate(read_only) if position in donated]
        self._call_inputs = [(inputs[n], plan.placed[n], n in donated) for n in per_call]
        self._unplaced = [inputs[n] for n in others if plan.placed[n] == sharding_ids.UNPLACED]
        self._donated_owned = frozenset(id(inputs[n]) for n in owned_positions if n in donated)
        positions = [*owned_positions, *read_only, *per_call]
        order = sorted(range(len(positions)), key=positions.__getitem__)
        self._order = None if order == [*range(len(positions))] else operator.itemgetter(*order)

    def are_owned(self) -> bool:
        """Whether no owned storage was read, written or annotated since the last run."""
        return self.state.are_owned() and all(stack.is_owned for stack in self._stacks)

    def owns(self, storage: Storage) -> bool:
        """Whether a storage is owned by the step."""
        return self.state.owns(storage) or id(storage) in self._stacked

    def fits(self, call: CallTensors) -> bool:
        """Whether no input is on a mesh that the program takes on one device.

        For such an input another capture would compile a program on the mesh. The reverse fits:
        `_settle` moves the input to the mesh.
        """
        storages = [call.storage(binding) for binding in self._unplaced]
        if not self.state.are_owned():
            storages += self.state.moved_out(sharding_ids.UNPLACED)
        for stack in self._stacks:
            if not stack.is_owned:
                storages += stack.moved_out(sharding_ids.UNPLACED)
        fits = True
        pending = []
        for storage in storages:
            value = raw_value(storage)
            if value.array is None and value.tape is not None:
                pending.append(visible(storage))
            elif value.layout != sharding_ids.UNPLACED:
                fits = False
        if pending:  # the layout is known after the computation
            materialize(pending)
            fits = fits and all(value.layout == sharding_ids.UNPLACED for value in pending)
        return fits

    def arrays(self, call: CallTensors) -> Sequence[jax.Array]:
        """The arrays to call the program with."""
        arrays: Any = self.state.arrays(self._prepare_owned)
        if self._storages:
            arrays += self._read_only_arrays()
        for binding, layout, donated in self._call_inputs:
            arrays.append(self._call_array(layout, call.storage(binding), donated=donated))
        if self._order is not None:
            arrays = self._order(arrays)
        if self._other_inputs:
            arrays = list(arrays)
        for position, other in self._other_inputs:
            arrays.insert(position, self._other_array(position, other))
        return padded(arrays) if self._in_blocks else arrays

    def _prepare_owned(self, storage: Storage, layout: int) -> Any:
        return self._prepare(layout, storage, donated=id(storage) in self._donated_owned)

    def _read_only_arrays(self) -> list[Any]:
        """The arrays of storages that the program only reads, the same ones in each call."""
        arrays, doubts = self._ready_arrays(self._storages)
        for index in sorted(doubts):
            layout, donated = self._layouts[index], doubts[index]
            arrays[index] = self._prepare(layout, self._storages[index], donated=donated)
        return arrays

    def _call_array(self, layout: int, storage: Storage, *, donated: bool) -> Any:
        """The array of a storage that differs from call to call."""
        value = peek(storage)
        array = value.array
        if value.layout == layout and not donated and _is_placed(type(array)):
            return array
        del value, array  # so that there is no other reference
        return self._prepare(layout, storage, donated=donated)

    def _ready_arrays(self, storages: list[Storage]) -> tuple[list[Any], dict[int, bool]]:
        """The arrays of storages; and those to be prepared, with whether they are donated."""
        values = list(map(peek, storages))
        arrays = list(map(_ARRAY, values))
        doubts: set[int] = set()
        if not all(map(_is_placed, set(map(type, arrays)))):
            ready = [isinstance(array, jax.Array | UnevenArray) for array in arrays]
            doubts |= {n for n, is_ready in enumerate(ready) if not is_ready}
        layouts = list(map(_LAYOUT, values))
        if layouts != self._layouts:
            pairs = zip(layouts, self._layouts, strict=True)
            doubts |= {n for n, (layout, expected) in enumerate(pairs) if layout != expected}
        certain = [n for n in self._donated if n not in doubts] if doubts else self._donated
        if certain:
            doubts |= _with_other_references(certain, storages, values)
        if not doubts:
            return arrays, {}
        donated = set(self._donated)
        return arrays, {n: n in donated for n in doubts}

    def _prepare(self, layout: int, storage: Storage, *, donated: bool) -> Any:
        """An input in its layout: a copy if it is donated and has other references."""
        self._settle(layout, visible(storage))
        if not donated or storage.is_sole_reference():
            return visible(storage).array
        array: Any = visible(storage).array
        (buffer,) = jax.tree.leaves(array)
        metrics.count("copies")
        metrics.count("copied_bytes", buffer.nbytes)
        with jax.enable_x64(True):
            return jax.tree.map(jnp.copy, array)

    def _other_array(self, position: int, other: Any) -> Any:
        """An input of the program that is not the array of a storage."""
        if isinstance(other, StackedState):
            return other.array(self._settle)
        return self._uploaded(position, other) if isinstance(other, CpuOperand) else other

    def _uploaded(self, position: int, operand: CpuOperand) -> Any:
        """An input of the program from a CPU tensor."""
        value = lazy_tensor.host_value(operand.read())
        value.layout = self._plan.placed[position]
        input_placement.place([value])
        return value.array

    def _settle(self, layout: int, value: Value) -> None:
        """Compute a value, and move it to the layout that the program takes."""
        if value.array is None:
            materialize([value])
        if value.layout != layout or not isinstance(value.array, jax.Array | UnevenArray):
            value.layout = value.layout if layout == sharding_ids.UNPLACED else layout
            input_placement.place([value])


def _with_other_references(
    indices: Sequence[int], storages: Sequence[Storage], values: list[Value]
) -> set[int]:
    """Which of these storages have values with other references.

    Each gets a new value with the same array, as in `Storage.is_sole_reference`: an old value that
    dies had no other reference.

    Args:
        indices: of the storages.
        storages: all of them.
        values: their values; emptied.
    """
    shared = {n for n in indices if values[n].taken is not None}
    references: list[tuple[int, Any]] = []
    for index in indices:
        if index not in shared:
            value = values[index]
            references.append((index, weakref.ref(value)))
            replacement = Value(value.array, value.layout)
            replacement.memory = value.memory
            storages[index].value = replacement
    value = None
    values.clear()
    for index, reference in references:
        shared_value = reference()
        if shared_value is not None:
            storages[index].value = shared_value
            shared.add(index)
    return shared


@cached(4096)
def _is_placed(cls: type) -> bool:
    """Whether arrays of a class are on devices."""
    return issubclass(cls, jax.Array | UnevenArray)


_ARRAY = operator.attrgetter("array")
_LAYOUT = operator.attrgetter("layout")
