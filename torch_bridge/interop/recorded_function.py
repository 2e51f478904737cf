"""Torch code as a program that JAX calls, with torch's own derivatives.

The code runs once, on placeholders with an autograd graph; JAX computes the recorded operations.
When JAX differentiates, torch's autograd runs backward from the results, and its recorded
operations are the backward pass (`isoshard.core.runtime.differentiable_calls`). Derivatives of that
are torch's double backward, from the same graph.

Torch's gradient of a complex number is the conjugate of JAX's cotangent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import torch

from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.runtime._jax_internals.primitive_rules import ShapedArray
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.differentiable_calls import call
from isoshard.core.runtime.differentiable_programs import Program
from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge._torch_internals.dispatcher import autograd_allowed
from isoshard.torch_bridge.common.argument_types import ArrayLike, Leaf
from isoshard.torch_bridge.common.dtypes import logical_dtype
from isoshard.torch_bridge.engine.capture.assemble import Repeat
from isoshard.torch_bridge.engine.capture.tracing_flag import compiling
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.subprograms.subtrace import SubTrace
from isoshard.torch_bridge.engine.values.value import Aval
from isoshard.torch_bridge.layout.widths import jax_dtype

from .convert import DECLARED, Result, ShardingById, aval_of, wrap
from .operand_ports import Port
from .recorded_program import RecordedGraph, RecordedProgram, differentiating
from .rolled_function import RolledProgram, layout_of


class Take(Protocol):
    """Converts the arguments of a function to tensors."""

    def __call__(
        self, leaf: Leaf, dtype: torch.dtype | None = None, *, like: torch.Tensor | None = None
    ) -> Any:
        """A tensor.

        Args:
            leaf: an array of JAX or NumPy, a tensor; anything else stays as it is.
            dtype: of the tensor; that of the array if it is not given.
            like: the module's tensor that it replaces: then it has its dtype and memory order, and
                is a leaf of the graph, with a gradient if that has one.
        """
        ...


def eager_take(shardings: ShardingById) -> Take:
    """A `Take` for code whose operations run at once."""

    def take(
        leaf: Leaf, dtype: torch.dtype | None = None, *, like: torch.Tensor | None = None
    ) -> Any:
        tensor = wrap(leaf, dtype, shardings.get(id(leaf)), like)
        wants = _is_inexact(tensor.dtype) if isinstance(tensor, torch.Tensor) else False
        if not isinstance(leaf, jax.Array) or not wants or not (like is None or like.requires_grad):
            return tensor
        tensor.requires_grad_()
        if like is not None:
            return tensor
        copy = tensor.clone()
        if id(leaf) in shardings:
            DECLARED[copy._storage.value] = shardings[id(leaf)]
        return copy

    return take


def recorded(
    code: Callable[[Take], Any],
    rng: ArrayLike | None,
    shardings: ShardingById,
    name: str,
    repeat: Repeat = None,
) -> Any:
    """Record code, and call the recorded program.

    Args:
        code: takes a `Take`; returns tensors in any nesting.
        rng: a key, or None.
        shardings: on the user's mesh.
        name: of the code, for messages.
        repeat: "auto" or "always" to have equal layers as loops.

    Returns:
        Its results, with a `Result` for each tensor.
    """
    with autograd_allowed():
        recording = FunctionRecording(shardings, name)
    try:
        with recording.subtrace, differentiating(), compiling(), no_cpu_draws(name):
            leaves, structure = pytree.tree_flatten(code(recording.take))
            ours = [leaf for leaf in leaves if isinstance(leaf, lazy_tensor.LazyTensor)]
            program = recording.program(ours, rng)
    finally:
        recording.subtrace.put_back()
    operands = recording.operands if rng is None else [*recording.operands, rng]
    called: Program = program
    if repeat is not None:
        layouts = [layout_of(operand, shardings.get(id(operand))) for operand in operands]
        called = RolledProgram(program, repeat, layouts)
    arrays = iter(call(called, *operands))
    results = [
        Result.of(leaf, next(arrays) if isinstance(leaf, lazy_tensor.LazyTensor) else None)
        for leaf in leaves
    ]
    return pytree.tree_unflatten(results, structure)


class FunctionRecording:
    """A recording of torch code on placeholders.

    Args:
        shardings: on the user's mesh.
        what: is called, for messages.

    Attributes:
        operands: the array behind each placeholder.
    """

    def __init__(self, shardings: ShardingById, name: str) -> None:
        """Nothing recorded yet."""
        self._shardings = shardings
        self.subtrace = SubTrace()
        self.subtrace.imports = True
        self.subtrace.stand_in = self._stand_in
        self.subtrace.folded = RecordedGraph(self.subtrace).folded
        self.subtrace.axes = set()
        self.subtrace.refusal = _NO_VALUE.format(name)
        self.operands: list[Any] = []
        self._leaves: list[lazy_tensor.LazyTensor] = []
        self._slots: list[int] = []

    def take(
        self, leaf: Leaf, dtype: torch.dtype | None = None, *, like: torch.Tensor | None = None
    ) -> Any:
        """A placeholder for an array."""
        if not isinstance(leaf, jax.Array) or isinstance(
            leaf, UnevenArray | lazy_tensor.LazyTensor
        ):
            return wrap(leaf, dtype, like=like)
        aval = aval_of(leaf, dtype, like)
        wants = _is_inexact(aval.meta.dtype) and (like is None or like.requires_grad)
        tensor = self.subtrace.input(aval, requires_grad=wants)
        self._add(tensor, leaf)
        copy: Any = tensor.clone() if wants and like is None else tensor
        if id(leaf) in self._shardings:
            DECLARED[copy._storage.value] = self._shardings[id(leaf)]
        return copy

    def _add(self, tensor: lazy_tensor.LazyTensor, array: Any) -> None:
        self._leaves.append(tensor)
        self._slots.append(self.subtrace.slot(tensor._storage.value))
        self.operands.append(array)

    def _stand_in(self, tensor: lazy_tensor.LazyTensor) -> Any:
        """A new operand for a tensor over a tracer of an outer trace; else None."""
        value = tensor._storage.value
        if not isinstance(value.array, Tracer) or not _is_inexact(tensor.dtype):
            return None
        leaf = self.subtrace.input(
            Aval.contiguous(tuple(tensor.shape), tensor.dtype), requires_grad=True
        )
        self._add(leaf, lazy_tensor.read(tensor).array)
        return leaf.clone()

    def program(
        self, results: Sequence[lazy_tensor.LazyTensor], rng: ArrayLike | None
    ) -> RecordedProgram:
        """The recorded program; to be called inside of `subtrace`.

        Args:
            results: tensors.
            rng: a key, the last operand, or None.
        """
        graph = RecordedGraph(self.subtrace)
        for slot, value in graph.around():
            if isinstance(value.array, Tracer):  # of an outer trace
                size, dtype = self.subtrace.tokens[slot]
                aval = Aval.contiguous(size, logical_dtype(dtype))
                self._add(lazy_tensor.fresh(aval, value), value.array)
        leaves, ports = list[Any](self._leaves), list[Port | None]()
        for leaf, array in zip(leaves, self.operands, strict=True):
            ports.append(Port(leaf._aval, ShapedArray(tuple(array.shape), array.dtype)))
        if rng is not None:
            leaves.append(None)
            ports.append(None)
        result_ports = []
        for result in results:
            aval = Aval.contiguous(tuple(result.shape), result.dtype)
            kind = ShapedArray(tuple(result.shape), jax_dtype(aval.physical))
            result_ports.append(Port(aval, kind, shared=True))
        return RecordedProgram(graph, leaves, self._slots, ports, list(results), result_ports)


@contextlib.contextmanager
def no_cpu_draws(name: str) -> Iterator[None]:
    """Context in which random numbers of the CPU, which no key of JAX governs, are an error.

    Raises:
        RuntimeError: some were drawn.
    """
    generator = torch.default_generator
    seed, before = generator.initial_seed(), generator.get_state().numpy().tobytes()
    yield
    if generator.initial_seed() == seed and generator.get_state().numpy().tobytes() != before:
        raise RuntimeError(_CPU_DRAWS.format(name))


_NO_VALUE = (
    "{} needs the value of a tensor while JAX traces it (jax.jit, jax.grad, jax.vmap), and there "
    "is one only when the program runs. Return the tensor; for a Python branch, use torch.where"
)
_CPU_DRAWS = (
    "{} draws random numbers on the CPU (torch.randn(..), torch.randperm(..), .normal_()), which "
    "no key of JAX governs: they would be the same in each run of a traced program. Draw them "
    "where the arguments are, torch.randn(.., device=x.device), and pass "
    "rng=jax.random.key(seed) to the function"
)


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
