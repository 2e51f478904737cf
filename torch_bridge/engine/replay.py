"""Run a captured step again: gather inputs, execute one program, store outputs."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
from torch.utils import _pytree as pytree

from isoshard.core import metrics

from . import base, layouts, program, random
from . import tape as tapes
from .host import HostOps
from .symbolic import Table
from .value import Aval, Storage, Value
from .views import Chain


@dataclasses.dataclass(frozen=True)
class Argument:
    """The memory of an argument of the step.

    Attributes:
        number: which tensor argument, in flattened order.
    """

    number: int


@dataclasses.dataclass(frozen=True)
class Computed:
    """A tensor in a step's result that the step computed.

    Attributes:
        number: which result of the program.
        aval: its size, stride and dtype.
    """

    number: int
    aval: Aval


@dataclasses.dataclass(frozen=True)
class View:
    """A tensor in a step's result that views an argument's memory.

    Attributes:
        argument: whose memory.
        aval: its size, stride and dtype.
        chain: how it views the memory.
        offset: its storage offset.
    """

    argument: Argument
    aval: Aval
    chain: Chain
    offset: int


@dataclasses.dataclass
class Replay:
    """A captured step.

    Attributes:
        plan: what was compiled.
        program: the executable.
        sources: for each leaf, where it is found: a storage, an `Argument`, or a constant array.
        targets: which result is written to which storage or `Argument`.
        table: expressions of the numbers that change.
        scalars: the lifted floats: constants and expressions.
        draws: which random keys the step takes, counted from the state it finds.
        host: CPU operations to repeat (step counters).
        outputs: the step's result, with `Computed` and `View` for tensors made anew.
        identity: the memory that the step works on; see `Watched.identity`.
    """

    plan: program.Plan
    program: program.Program
    sources: list[Any]
    targets: list[tuple[int, Any]]
    table: Table
    scalars: list[Any]
    draws: random.Draws
    host: HostOps
    outputs: Any
    identity: tuple[int, ...] = ()

    def __call__(self, arguments: list[base.LazyTensor]) -> Any:
        """Run the step on the present values."""
        self.host.repeat()
        return self.run(arguments)

    def run(self, arguments: list[base.LazyTensor]) -> Any:
        """Run the step without repeating its CPU operations."""
        scalars = self.table.evaluate(self.scalars)
        donated = frozenset(self.plan.donated)
        arrays = [
            self._array(position, source, arguments, position in donated)
            for position, source in enumerate(self.sources)
        ]
        words = self.draws.take()
        results = program.run(self.program, self.plan, arrays, scalars, words)
        values = [
            Value(array, number)
            for array, number in zip(results, self.program.layouts or (), strict=True)
        ]
        for number, place in self.targets:
            _storage(place, arguments).write(values[number])
        return self._fill(values, arguments)

    def _array(
        self, position: int, source: Any, arguments: list[base.LazyTensor], donated: bool
    ) -> jax.Array:
        if isinstance(source, jax.Array):
            return source
        value = _storage(source, arguments).value
        array = value.array
        if array is None:
            tapes.materialize([value])
            array = value.array
        wanted = self.plan.placed[position]
        if value.layout != wanted or not isinstance(array, jax.Array):
            value.layout = value.layout if wanted == layouts.UNPLACED else wanted
            program.place([value])
            array = value.array
        if donated and self._is_held(value, array):
            metrics.count("copies")
            metrics.count("copied_bytes", array.nbytes)
            return jnp.copy(array)
        return array

    @staticmethod
    def _is_held(value: Value, array: jax.Array) -> bool:
        """Whether somebody beside the storage would miss the array."""
        # value: storage, caller, here, getrefcount; array: value, caller, here, getrefcount.
        return value.shared or sys.getrefcount(value) > 4 or sys.getrefcount(array) > 4

    def _fill(self, values: list[Value], arguments: list[base.LazyTensor]) -> Any:
        def leaf(mark: Any) -> Any:
            if isinstance(mark, Computed):
                return base.fresh(mark.aval, values[mark.number])
            if isinstance(mark, Argument):
                return arguments[mark.number]
            if isinstance(mark, View):
                storage = arguments[mark.argument.number]._storage
                return base.new_tensor(mark.aval, storage, mark.chain, mark.offset)
            return mark

        return pytree.tree_map(leaf, self.outputs)


def _storage(place: Any, arguments: list[base.LazyTensor]) -> Storage:
    return arguments[place.number]._storage if isinstance(place, Argument) else place
