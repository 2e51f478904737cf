"""Recorded torch code as a program that JAX calls, and torch's derivative of it.

Torch's gradient of a complex number is the conjugate of JAX's cotangent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.differentiable_programs import Derivative
from isoshard.core.runtime.shard_map_axes import varying
from isoshard.torch_bridge._torch_internals.dispatcher import autograd_allowed
from isoshard.torch_bridge._torch_internals.undocumented import is_autocast_enabled
from isoshard.torch_bridge.common.argument_types import ArrayLike
from isoshard.torch_bridge.engine.compiling import input_placement
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.subprograms.subprogram import Subprogram, cut, needed_slots
from isoshard.torch_bridge.engine.subprograms.subtrace import SubTrace
from isoshard.torch_bridge.engine.values.value import Value

from .operand_ports import Port


class RecordedGraph:
    """What the programs of one recording have together."""

    def __init__(self, subtrace: SubTrace):
        """See the class."""
        self.subtrace = subtrace

    @contextlib.contextmanager
    def more(self) -> Iterator[None]:
        """Context in which torch's autograd records more."""
        without = torch.autocast("jax", enabled=False) if is_autocast_enabled("jax") else None
        with self.subtrace, differentiating(), without or contextlib.nullcontext():
            yield

    def part(self, given: Sequence[int], wanted: Sequence[int]) -> Computation:
        """What computes some slots from others, and from what the code reads beside operands."""
        around = [
            (slot, value) for slot, value in self.around() if not isinstance(value.array, Tracer)
        ]
        program = cut(self.subtrace, [*given, *(slot for slot, _ in around)], wanted)
        floats = [self.subtrace.scalars[number] for number in program.scalars]
        return Computation(program, [_array(value) for _, value in around], floats)

    def folded(self, slot: int) -> Any:
        """What is the same for all operands, computed now."""
        with jax.ensure_compile_time_eval(), _as_torch():
            return self.part([], [slot]).run([], None)[0]

    def around(self) -> list[tuple[int, Value]]:
        """What the code reads that is no operand: slots, and the values there."""
        values = [*self.subtrace.firsts(), *self.subtrace.constants]
        return list(zip(self.subtrace.around_slots(), values, strict=True))


@dataclasses.dataclass(frozen=True)
class Computation:
    """A part of what was recorded.

    Attributes:
        program: takes operands, and arrays from around.
        around: those arrays.
        floats: the lifted floats.
    """

    program: Subprogram
    around: list[Any]
    floats: list[Any]

    def run(self, arrays: Sequence[Any], key: ArrayLike | None) -> list[Any]:
        """Its results."""
        if self.program.draws and key is None:
            names = [recipe.name for recipe in self.program.recipes if recipe.random]
            raise RuntimeError(_NO_KEY.format(", ".join(sorted(names))))
        floats = [jnp.asarray(one, jnp.float64) for one in self.floats]
        return self.program.run([*arrays, *map(jnp.asarray, self.around)], floats, key)


class RecordedProgram:
    """Recorded code as a `Program`.

    Args:
        graph: of the recording.
        leaves: a tensor for each operand; None for a key.
        inputs: the slots of those tensors, before the code ran.
        operands: their ports.
        tensors: the results.
        results: their ports.
    """

    def __init__(
        self,
        graph: RecordedGraph,
        leaves: Sequence[lazy_tensor.LazyTensor | None],
        inputs: Sequence[int],
        operands: Sequence[Port | None],
        tensors: Sequence[lazy_tensor.LazyTensor],
        results: Sequence[Port],
    ):
        """See the class; to be called inside the recording."""
        self.graph = graph
        self.leaves, self.operands = list(leaves), list(operands)
        self.tensors, self.ports = list(tensors), list(results)
        self.inputs = list(inputs)
        self.slots = graph.subtrace.slots(self.tensors)
        self._linears: dict[tuple[int, ...], Derivative] = {}

    def __call__(self, *operands: Any) -> list[Any]:
        """The results."""
        return self.found(self.run(self._forward, operands), operands)

    def found(self, arrays: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """The results in JAX.

        Args:
            arrays: as torch has them.
            operands: of the program.
        """
        axes = self.axes(operands)
        return [
            port.to_jax(port.together(one, axes, operands), "a result")
            for port, one in zip(self.ports, arrays, strict=True)
        ]

    def axes(self, operands: Sequence[Any]) -> frozenset[Any]:
        """Axes of a `jax.shard_map` around, over which the code may differ."""
        return frozenset(self.graph.subtrace.axes or ()).union(*map(varying, operands))

    def linear(self, which: tuple[int, ...]) -> Derivative:
        """With respect to some operands; recorded when first asked for."""
        if which not in self._linears:
            self._linears[which] = RecordedDerivative(self, which)
        return self._linears[which]

    def spread(self, index: int, tangent: ArrayLike) -> Any:
        """A tangent as it is."""
        return tangent

    @functools.cached_property
    def _forward(self) -> Computation:
        return self.graph.part(self.inputs, self.slots)

    def run(
        self, part: Computation, operands: Sequence[Any], more: Sequence[Any] = ()
    ) -> list[Any]:
        """Compute a part of what was recorded.

        Args:
            part: takes the operands, and `more`.
            operands: of the program.
            more: other arrays, as they are.
        """
        key, given, axes = None, [], self.axes(operands)
        with _as_torch():
            for port, one in zip(self.operands, operands, strict=True):
                if port is None:
                    key = one
                else:
                    given.append(port.to_torch(port.apart(_as_array(one), axes)))
            return part.run([*given, *more], key)


class RecordedDerivative:
    """The derivative of recorded code, by torch's autograd.

    Inside `jax.shard_map` each device runs torch's autograd on what it has. What is alike on some
    devices counts once in JAX and for each of them there: cotangents of such results are divided
    among the devices, and those of such operands are added up.

    Args:
        program: the code.
        which: numbers of its operands that change.
    """

    def __init__(self, program: RecordedProgram, which: tuple[int, ...]):
        """Let torch run backward, on placeholders."""
        self._program, self.which = program, which
        graph, subtrace = program.graph, program.graph.subtrace
        self.count = len(program.operands)
        self.with_cotangent: Sequence[int] = [
            number
            for number, (tensor, port) in enumerate(
                zip(program.tensors, program.ports, strict=True)
            )
            if tensor.requires_grad and port.has_slope
        ]
        self._given = [program.ports[number].slope() for number in self.with_cotangent]
        ports: list[Any] = [program.operands[number] for number in which]
        self._found = [port.slope(number) for port, number in zip(ports, which, strict=True)]
        with graph.more():
            given = [subtrace.input(port.aval) for port in self._given]
            slots = subtrace.slots(given)
            border = min(slots, default=0)
            found = self._gradients(given, create_graph=False)
            wanted = [
                None if one is None else subtrace.slot(lazy_tensor.read(one)) for one in found
            ]
        there = [slot for slot in wanted if slot is not None]
        inputs = program.inputs
        available = [*inputs, *slots, *subtrace.around_slots()]
        _, kept = needed_slots(subtrace, there, available, border)
        self._forward = graph.part(inputs, [*program.slots, *kept])
        self._backward = graph.part([*inputs, *slots, *kept], there)
        self._has = [slot is not None for slot in wanted]

    def _gradients(self, given: Sequence[Any], *, create_graph: bool) -> Sequence[Any]:
        program = self._program
        results = [program.tensors[number] for number in self.with_cotangent]
        leaves: list[Any] = [program.leaves[number] for number in self.which]
        wants = [leaf for leaf in leaves if leaf.requires_grad]
        if not results or not wants:
            return [None] * len(leaves)
        options: Any = {"retain_graph": True, "create_graph": create_graph}
        try:
            found = torch.autograd.grad(results, wants, list(given), allow_unused=True, **options)
        except RuntimeError as error:
            if _OF_BACKWARD not in str(error):
                raise
            found = _accumulated(results, given, wants, options)
        gradients = iter(found)
        return [next(gradients) if leaf.requires_grad else None for leaf in leaves]

    def forward(self, *operands: Any) -> tuple[list[Any], list[Any]]:
        """The results, and the residuals."""
        program = self._program
        found = program.run(self._forward, operands)
        count = len(program.ports)
        return program.found(found[:count], operands), found[count:]

    def backward(
        self, operands: Sequence[Any], residuals: Sequence[Any], cotangents: Sequence[Any]
    ) -> list[Any]:
        """The cotangents of the operands `which`."""
        axes = self._program.axes(operands)
        with _as_torch():
            given = [
                port.to_torch(port.apart(_as_array(one), axes))
                for port, one in zip(self._given, cotangents, strict=True)
            ]
        found = iter(self._program.run(self._backward, operands, [*given, *residuals]))
        return [
            port.to_jax(port.together(next(found), axes, operands), "a gradient")
            if has
            else port.zeros(operands)
            for port, has in zip(self._found, self._has, strict=True)
        ]

    @functools.cached_property
    def vjp(self) -> RecordedProgram:
        """Torch's backward, as code that torch can differentiate again."""
        program, subtrace = self._program, self._program.graph.subtrace
        with program.graph.more():
            given = [subtrace.input(port.aval, requires_grad=True) for port in self._given]
            slots = subtrace.slots(given)
            found = self._gradients([one.clone() for one in given], create_graph=True)
            tensors: list[Any] = [
                torch.zeros(port.aval.meta.size, dtype=port.aval.meta.dtype, device="jax")
                if one is None
                else one
                for port, one in zip(self._found, found, strict=True)
            ]
            return RecordedProgram(
                program.graph,
                [*program.leaves, *given],
                [*program.inputs, *slots],
                [*program.operands, *self._given],
                tensors,
                self._found,
            )


_OF_BACKWARD = "use_reentrant=True"
"""In what torch says of checkpoints that ask for `backward`, with all leaves."""


def _accumulated(results: Any, given: Any, wants: Any, options: Any) -> list[Any]:
    """Gradients as `backward` leaves them in the leaves."""
    torch.autograd.backward(results, list(given), **options)
    found = [leaf.grad for leaf in wants]
    for leaf in wants:
        leaf.grad = None
    return found


@contextlib.contextmanager
def differentiating() -> Iterator[None]:
    """Context in which torch's autograd records, also inside one of its functions."""
    with autograd_allowed(), torch.enable_grad():
        yield


@contextlib.contextmanager
def _as_torch() -> Iterator[None]:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


_NO_KEY = (
    "{} draws random numbers, but this function was traced without a key: pass "
    "rng=jax.random.key(seed) when you call it, or use .eval()"
)


def _as_array(operand: Any) -> Any:
    """An operand with an array's methods: JAX hands NumPy constants of a trace on as they are."""
    if not isinstance(operand, np.ndarray):
        return jnp.asarray(operand)
    with jax.ensure_compile_time_eval():
        return jnp.asarray(np.asarray(operand))


def _array(value: Any) -> Any:
    if isinstance(value.array, np.ndarray):
        return value.array
    with jax.ensure_compile_time_eval():
        return input_placement.array_of(value)
