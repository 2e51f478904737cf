"""Run a captured step again: gather inputs, execute one program, store outputs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from isoshard.core import metrics
from isoshard.core.uneven import UnevenArray
from isoshard.torch_bridge._torch_internals import pytree

from .. import base, layouts, placement, program, random
from .. import tape as tapes
from ..blocks import padded
from ..value import Aval, Storage, Value
from .guards import Guard
from .holders import Holder
from .host import HostOps
from .places import Argument, Computed, Gradient, New, Operand, Owner, Part, Place, Scene, View
from .sealed import sealed
from .symbolic import Table, filled
from .tensor_guard import TensorGuard


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
        made: the tensors made anew.
        table: expressions of the numbers that change.
        scalars: the lifted floats: constants and expressions.
        draws: which random keys the step takes, counted from the state it finds.
        host: CPU operations to repeat (step counters).
        outputs: the step's result, with places, views and `New` for tensors.
        guards: what must be as it was when the step was captured.
        written: where Python keeps numbers that the step computes, and the expressions for them.
    """

    plan: program.Plan
    program: program.Program
    sources: list[Any]
    targets: list[tuple[int, Place]]
    owners: list[Owner]
    gradients: list[tuple[int, Any]]
    made: list[Computed | Part]
    table: Table
    scalars: list[Any]
    draws: random.Draws
    host: HostOps
    outputs: Any
    guards: tuple[Guard, TensorGuard]
    written: list[tuple[Holder, torch.SymFloat]]

    def fits(self) -> bool:
        """Whether the step would do the same again, on the same tensors."""
        values, tensors = self.guards
        return values.holds() and tensors.holds()

    def __call__(self, arguments: list[base.LazyTensor]) -> Any:
        """Run the step on the present values."""
        self.host.repeat()
        return self.run(arguments)

    def run(self, arguments: list[base.LazyTensor]) -> Any:
        """Run the step without repeating its CPU operations."""
        scene = Scene(arguments, self.owners)
        numbers = self.table.values()
        scalars = [filled(scalar, numbers) for scalar in self.scalars]
        donated = frozenset(self.plan.donated)
        usual = _references(_OWN)
        arrays = [
            source
            if isinstance(source, jax.Array | UnevenArray)
            else self._from_host(position, source)
            if isinstance(source, Operand)
            else self._array(
                position, scene.storage(source), usual if position in donated else None
            )
            for position, source in enumerate(self.sources)
        ]
        words = self.draws.take()
        results = program.run(self.program, self.plan, padded(arrays), scalars, words)
        values = [
            Value(array, number)
            for array, number in zip(results, self.program.layouts or (), strict=True)
        ]
        for number, place in self.targets:
            scene.storage(place).write(values[number])
        made = self._make(values)
        for place, scalar in self.written:
            place.put_back([filled(scalar, numbers)])
        outputs = pytree.tree_map(
            lambda mark: filled(_filled(mark, scene, made), numbers), self.outputs
        )
        for number, mark in self.gradients:
            scene.owner(number).grad = _filled(mark, scene, made)
        return outputs

    def _array(self, position: int, storage: Storage, usual: tuple[int, int] | None) -> jax.Array:
        """An input of the program.

        Args:
            position: of the input.
            storage: where its value is.
            usual: if it is donated, the references to a value and its array that nobody else holds.
        """
        self._settle(position, storage)
        if usual is not None and (
            storage.value.shared
            or any(have > own for have, own in zip(_references(storage), usual, strict=True))
        ):
            array: Any = storage.value.array
            (buffer,) = jax.tree.leaves(array)
            metrics.count("copies")
            metrics.count("copied_bytes", buffer.nbytes)
            return jax.tree.map(jnp.copy, array)
        return storage.value.array

    def _from_host(self, position: int, source: Operand) -> jax.Array:
        """An input of the program that a CPU tensor holds."""
        value = base.host_value(source.read())
        value.layout = self.plan.placed[position]
        placement.place([value])
        return value.array

    def _settle(self, position: int, storage: Storage) -> None:
        """Compute a value, and bring it to the layout that the program takes."""
        value = storage.value
        if value.array is None:
            tapes.materialize([value])
        wanted = self.plan.placed[position]
        if value.layout != wanted or not isinstance(value.array, jax.Array | UnevenArray):
            value.layout = value.layout if wanted == layouts.UNPLACED else wanted
            placement.place([value])

    def _make(self, values: Sequence[Value]) -> list[base.LazyTensor]:
        """The tensors that are new in this run."""
        memories: dict[int, Storage] = {}
        made = []
        for mark in self.made:
            if isinstance(mark, Computed):
                tensor = base.fresh(mark.aval, values[mark.number])
                made.append(sealed(tensor) if mark.differentiable else tensor)
                continue
            memory = memories.get(mark.memory)
            if memory is None:
                memory = memories[mark.memory] = Storage(values[mark.number], mark.whole)
            tensor = base.new_tensor(mark.aval, memory, mark.chain, mark.offset)
            made.append(sealed(tensor) if mark.differentiable else tensor)
        return made


def _filled(mark: Any, scene: Scene, made: Sequence[base.LazyTensor]) -> Any:
    """What stands for a mark in this run; anything else stands for itself."""
    if isinstance(mark, New):
        return made[mark.number]
    if isinstance(mark, Argument | Gradient):
        return scene.tensor(mark)
    if isinstance(mark, View):
        storage = scene.storage(mark.place)
        tensor = base.new_tensor(mark.aval, storage, mark.chain, mark.offset)
        return sealed(tensor) if mark.differentiable else tensor
    return mark


def _references(storage: Storage) -> tuple[int, int]:
    """How many references there are to a storage's value, and to its array."""
    value = storage.value
    array = value.array
    return sys.getrefcount(value), sys.getrefcount(array)


# What `_references` counts depends on who runs the function: once dynamo has been used in a
# process, each of its frames holds its variables twice.
_OWN = Storage(Value(np.empty(0), layouts.UNPLACED), Aval.contiguous((0,), torch.float32))
