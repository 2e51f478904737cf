"""Run a captured step again: gather inputs, execute one program, store outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from isoshard.core import metrics
from isoshard.core.uneven import UnevenArray
from isoshard.torch_bridge._torch_internals import pytree

from .. import base, layouts, placement, program, random
from ..blocks import padded
from ..log import visible
from ..recorder import materialize
from ..value import Storage, Value
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
        arrays = [
            source
            if isinstance(source, jax.Array | UnevenArray)
            else self._from_host(position, source)
            if isinstance(source, Operand)
            else self._array(position, scene.storage(source), donated=position in donated)
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

    def _array(self, position: int, storage: Storage, *, donated: bool) -> jax.Array:
        """An input of the program: a copy, if it is donated and somebody else can see it.

        Args:
            position: of the input.
            storage: where its value is.
            donated: whether the program overwrites its memory.
        """
        self._settle(position, visible(storage))
        if not donated or storage.is_sole_holder():
            return visible(storage).array
        array: Any = visible(storage).array
        (buffer,) = jax.tree.leaves(array)
        metrics.count("copies")
        metrics.count("copied_bytes", buffer.nbytes)
        return jax.tree.map(jnp.copy, array)

    def _from_host(self, position: int, source: Operand) -> jax.Array:
        """An input of the program that a CPU tensor holds."""
        value = base.host_value(source.read())
        value.layout = self.plan.placed[position]
        placement.place([value])
        return value.array

    def _settle(self, position: int, value: Value) -> None:
        """Compute a value, and bring it to the layout that the program takes."""
        if value.array is None:
            materialize([value])
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
