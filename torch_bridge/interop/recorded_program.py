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
from isoshard.torch_bridge.engine.subprograms.subprogram import Subprogram, extract, needed_slots
from isoshard.torch_bridge.engine.subprograms.subtrace import SubTrace
from isoshard.torch_bridge.engine.values.value import Value

from .operand_ports import Port


class RecordedGraph:
    """A recording, which several programs share: forward, backward, and backward of backward."""

    def __init__(self, subtrace: SubTrace):
        """See the class."""
        self.subtrace = subtrace

    @contextlib.contextmanager
    def more(self) -> Iterator[None]:
        """Context in which torch's autograd records more."""
        without = torch.autocast("jax", enabled=False) if is_autocast_enabled("jax") else None
        with self.subtrace, differentiating(), without or contextlib.nullcontext():
            yield

    def computation(self, inputs: Sequence[int], outputs: Sequence[int]) -> Computation:
        """The computation of some slots from others and from the captured values."""
        around = [
            (slot, value) for slot, value in self.around() if not isinstance(value.array, Tracer)
        ]
        program = extract(self.subtrace, [*inputs, *(slot for slot, _ in around)], outputs)
        floats = [self.subtrace.scalars[index] for index in program.scalars]
        return Computation(program, [_array(value) for _, value in around], floats)

    def folded(self, slot: int) -> Any:
        """A value that depends on no operand, computed now."""
        with jax.ensure_compile_time_eval(), _as_torch():
            return self.computation([], [slot]).run([], None)[0]

    def around(self) -> list[tuple[int, Value]]:
        """The captured values, which the code reads and which are no operands, with their slots."""
        values = [*self.subtrace.firsts(), *self.subtrace.constants]
        return list(zip(self.subtrace.around_slots(), values, strict=True))


@dataclasses.dataclass(frozen=True)
class Computation:
    """Operations of a recording.

    Attributes:
        program: takes operands, and the captured arrays.
        around: the captured arrays.
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
        floats = [jnp.asarray(scalar, jnp.float64) for scalar in self.floats]
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
        return self.to_jax(self.run(self._forward, operands), operands)

    def to_jax(self, arrays: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """The results in JAX.

        Args:
            arrays: as torch has them.
            operands: of the program.
        """
        axes = self.axes(operands)
        return [
            port.to_jax(port.reduce_over(array, axes, operands), "a result")
            for port, array in zip(self.ports, arrays, strict=True)
        ]

    def axes(self, operands: Sequence[Any]) -> frozenset[Any]:
        """Axes of an outer `jax.shard_map` over which the code may vary."""
        return frozenset(self.graph.subtrace.axes or ()).union(*map(varying, operands))

    def linear(self, which: tuple[int, ...]) -> Derivative:
        """The derivative with respect to some operands; recorded at the first call."""
        if which not in self._linears:
            self._linears[which] = RecordedDerivative(self, which)
        return self._linears[which]

    def spread(self, index: int, tangent: ArrayLike) -> Any:
        """A tangent as it is."""
        return tangent

    @functools.cached_property
    def _forward(self) -> Computation:
        return self.graph.computation(self.inputs, self.slots)

    def run(
        self, computation: Computation, operands: Sequence[Any], more: Sequence[Any] = ()
    ) -> list[Any]:
        """Run a computation of the recording.

        Args:
            computation: takes the operands, and `more`.
            operands: of the program.
            more: other arrays, as they are.
        """
        key, arrays, axes = None, [], self.axes(operands)
        with _as_torch():
            for port, operand in zip(self.operands, operands, strict=True):
                if port is None:
                    key = operand
                else:
                    arrays.append(port.to_torch(port.vary_over(_as_array(operand), axes)))
            return computation.run([*arrays, *more], key)


class RecordedDerivative:
    """The derivative of recorded code, by torch's autograd.

    Inside `jax.shard_map` each device runs torch's autograd on its own values. A value that is
    replicated over an axis counts once in JAX, and once for each device there: cotangents of such
    results are divided among the devices, and those of such operands are summed.

    Args:
        program: the code.
        which: indices of the operands to differentiate with respect to.
    """

    def __init__(self, program: RecordedProgram, which: tuple[int, ...]):
        """Record torch's backward pass, on placeholders."""
        self._program, self.which = program, which
        graph, subtrace = program.graph, program.graph.subtrace
        self.count = len(program.operands)
        self.with_cotangent: Sequence[int] = [
            index
            for index, (tensor, port) in enumerate(zip(program.tensors, program.ports, strict=True))
            if tensor.requires_grad and port.has_cotangent
        ]
        self._cotangent_ports = [program.ports[index].cotangent() for index in self.with_cotangent]
        ports: list[Any] = [program.operands[index] for index in which]
        self._gradient_ports = [
            port.cotangent(index) for port, index in zip(ports, which, strict=True)
        ]
        with graph.more():
            cotangents = [subtrace.input(port.aval) for port in self._cotangent_ports]
            slots = subtrace.slots(cotangents)
            backward_start = min(slots, default=0)
            gradients = self._gradients(cotangents, create_graph=False)
            gradient_slots = [
                None if gradient is None else subtrace.slot(lazy_tensor.read(gradient))
                for gradient in gradients
            ]
        present = [slot for slot in gradient_slots if slot is not None]
        inputs = program.inputs
        available = [*inputs, *slots, *subtrace.around_slots()]
        _, residuals = needed_slots(subtrace, present, available, backward_start)
        self._forward = graph.computation(inputs, [*program.slots, *residuals])
        self._backward = graph.computation([*inputs, *slots, *residuals], present)
        self._has = [slot is not None for slot in gradient_slots]

    def _gradients(self, cotangents: Sequence[Any], *, create_graph: bool) -> Sequence[Any]:
        program = self._program
        results = [program.tensors[index] for index in self.with_cotangent]
        leaves: list[Any] = [program.leaves[index] for index in self.which]
        wants = [leaf for leaf in leaves if leaf.requires_grad]
        if not results or not wants:
            return [None] * len(leaves)
        options: Any = {"retain_graph": True, "create_graph": create_graph}
        try:
            gradients = torch.autograd.grad(
                results, wants, list(cotangents), allow_unused=True, **options
            )
        except RuntimeError as error:
            if _OF_BACKWARD not in str(error):
                raise
            gradients = _accumulated(results, cotangents, wants, options)
        gradients_left = iter(gradients)
        return [next(gradients_left) if leaf.requires_grad else None for leaf in leaves]

    def forward(self, *operands: Any) -> tuple[list[Any], list[Any]]:
        """The results, and the residuals."""
        program = self._program
        outputs = program.run(self._forward, operands)
        count = len(program.ports)
        return program.to_jax(outputs[:count], operands), outputs[count:]

    def backward(
        self, operands: Sequence[Any], residuals: Sequence[Any], cotangents: Sequence[Any]
    ) -> list[Any]:
        """The cotangents of the operands `which`."""
        axes = self._program.axes(operands)
        with _as_torch():
            arrays = [
                port.to_torch(port.vary_over(_as_array(cotangent), axes))
                for port, cotangent in zip(self._cotangent_ports, cotangents, strict=True)
            ]
        gradients_left = iter(self._program.run(self._backward, operands, [*arrays, *residuals]))
        return [
            port.to_jax(port.reduce_over(next(gradients_left), axes, operands), "a gradient")
            if has
            else port.zeros(operands)
            for port, has in zip(self._gradient_ports, self._has, strict=True)
        ]

    @functools.cached_property
    def vjp(self) -> RecordedProgram:
        """Torch's backward, as code that torch can differentiate again."""
        program, subtrace = self._program, self._program.graph.subtrace
        with program.graph.more():
            cotangents = [
                subtrace.input(port.aval, requires_grad=True) for port in self._cotangent_ports
            ]
            slots = subtrace.slots(cotangents)
            gradients = self._gradients(
                [cotangent.clone() for cotangent in cotangents], create_graph=True
            )
            tensors: list[Any] = [
                torch.zeros(port.aval.meta.size, dtype=port.aval.meta.dtype, device="jax")
                if gradient is None
                else gradient
                for port, gradient in zip(self._gradient_ports, gradients, strict=True)
            ]
            return RecordedProgram(
                program.graph,
                [*program.leaves, *cotangents],
                [*program.inputs, *slots],
                [*program.operands, *self._cotangent_ports],
                tensors,
                self._gradient_ports,
            )


_OF_BACKWARD = "use_reentrant=True"
"""In torch's message of reentrant checkpoints, which support `backward` only, for all leaves."""


def _accumulated(results: Any, cotangents: Any, wants: Any, options: Any) -> list[Any]:
    """Gradients by `backward`, which accumulates them in the leaves."""
    torch.autograd.backward(results, list(cotangents), **options)
    gradients = [leaf.grad for leaf in wants]
    for leaf in wants:
        leaf.grad = None
    return gradients


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
    """An operand as a `jax.Array`: JAX passes NumPy constants of a trace on as they are."""
    if not isinstance(operand, np.ndarray):
        return jnp.asarray(operand)
    with jax.ensure_compile_time_eval():
        return jnp.asarray(np.asarray(operand))


def _array(value: Any) -> Any:
    if isinstance(value.array, np.ndarray):
        return value.array
    with jax.ensure_compile_time_eval():
        return input_placement.array_of(value)
