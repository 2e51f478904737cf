"""A JAX function, called on DTensors: in every rank one compiled program, and one for its gradient.

    block = iso.torch_function(jax_block)            # in every rank, under torchrun
    y = block(dict(module.named_parameters()), x)     # DTensors in, DTensors out
    y.sum().backward()                                # gradients, placed as their tensors

The DTensors cross without a copy, as `isoshard.to_jax` does it. The function is jitted over their
mesh, so it sees whole arrays and XLA places the collectives; while it is traced the mesh is JAX's
current one, and `jax.lax.with_sharding_constraint(h, P("dp", "tp"))` and `jax.shard_map` find it.
Results are DTensors with the placements that XLA chose, or those of `out_sharding`.

Gradients follow torch's rules. What the VJP needs is kept, not computed again. A gradient has
the placements of its tensor, so that of a replicated one is summed already. A gradient that
arrives with other placements than its result, Partial among them, is redistributed first, by
DTensor itself; one without memory of its own, as that of a sum, is copied (and counted). Gradients
of gradients are functions called in the same way.

All ranks of the mesh must make the same calls in the same order, as for every collective. Before a
program is compiled they compare what they are about to run, and all raise if it is not the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import DistributedError, ShardingError
from isoshard.core.layout.spec import SpecLike
from isoshard.core.processes.agreement import log_call, report_error
from isoshard.core.runtime.caches import PROGRAMS, Bounded
from isoshard.torch_bridge.dtensor import dtensor_exchange
from isoshard.torch_bridge.dtensor.dtensor_exchange import is_dtensor
from isoshard.torch_bridge.dtensor.routes import TO_JAX
from isoshard.torch_bridge.modules import modules
from isoshard.torch_bridge.placements import translation

from . import fitting
from .function_reads import Reads
from .jax_operands import TENSOR, of_operands, sorted_out, surroundings
from .rank_program import RankProgram, subject_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


class DistributedFunction:
    """A function of DTensors that a JAX function computes; see `isoshard.torch_function`."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        out_sharding: SpecLike = None,
        reads: Reads | None = None,
    ):
        """See `isoshard.torch_function`.

        Args:
            function: pure, and traceable by `jax.jit`.
            name: for error messages and reports.
            out_sharding: layouts of the results, a prefix of their tree; None leaves them to XLA.
            reads: what the function reads, if that may change.
        """
        self.name = name
        self._function, self._out_sharding, self._reads = function, out_sharding, reads
        self._known: Bounded[Any, RankProgram] = Bounded(PROGRAMS, "jax_function: DTensors")
        self._own = partial("{}: tensors of its own".format, name)

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Compute the function in every rank of the mesh.

        Args:
            args: the JAX function's arguments, with DTensors for arrays. A module stands for the
                dictionary of its parameters and buffers.
            kwargs: likewise.

        Returns:
            The JAX function's result, with DTensors for arrays.

        Raises:
            TypeError: a tensor is none of DTensor's, or a constant cannot be hashed.
            ShardingError: DTensors lie on different meshes, are split unevenly, or hold sums that
                were not taken yet; all of them in one message.
            DistributedError: the ranks are about to run different programs.
        """
        args, kwargs = jax.tree.map(_opened, (tuple(args), kwargs))
        leaves, structure = jax.tree.flatten((args, kwargs))
        mesh = next(leaf.device_mesh for leaf in leaves if is_dtensor(leaf))
        try:
            fitting.check(self.name, mesh, leaves, (args, kwargs))
        except (ShardingError, TypeError) as error:
            if not self._known:  # the others compile, and compare what
                report_error(f"the call of {self.name}", error, mesh.mesh.flatten().tolist())
            raise
        operands = [_Given.of(leaf, mesh) for leaf in leaves]
        fixed = tuple([operand.kind for operand in operands])
        operands = [operand for operand in operands if operand.array is not None]
        arrays = [operand.array for operand in operands]
        tensors = [operand.tensor for operand in operands]
        differentiate = torch.is_grad_enabled()
        wanted = tuple([differentiate and t is not None and t.requires_grad for t in tensors])
        avals = tuple([(array.shape, array.dtype, array.sharding) for array in arrays])
        version = self._reads and self._reads.version()
        key = (structure, fixed, avals, wanted, mesh, version, *surroundings())
        try:
            program = self._known.get(key)
        except TypeError as error:
            raise TypeError(
                f"{self.name} takes DTensors, arrays and hashable constants: {error}"
            ) from None
        if program is None:
            flat = of_operands(self._function, structure, fixed)
            try:
                with self._reads.tracing() if self._reads else nullcontext():
                    program = RankProgram(flat, arrays, wanted, mesh, self.name, self._out_sharding)
            except DistributedError:
                raise  # they know
            except Exception as error:
                report_error(subject_of(self.name), error, mesh.mesh.flatten().tolist())
                raise
            self._known[key] = program
        else:
            log_call(subject_of(self.name), partial(_as_before, avals))
        if any(wanted):
            results = _RankCall.apply(program, arrays, *tensors)
        else:
            results = program.results(program.forward(arrays))
        return jax.tree.unflatten(program.pulled.structure, results)

    def pass_by(self) -> None:
        """Say that a call has no DTensors, and so asks no rank, as one that has would."""
        for subject in (TO_JAX, subject_of(self.name)):
            log_call(subject, self._own)


def _as_before(avals: Sequence[Any]) -> str:
    return "DTensors as before, " + ", ".join(f"{tuple(one[0])} of {one[1]}" for one in avals)


class _Given:
    """One argument: what kind it is, its array, and the DTensor that this is the array of."""

    __slots__ = ("array", "kind", "tensor")

    def __init__(self, kind: Any, array: Any, tensor: Any = None):
        self.kind, self.array, self.tensor = kind, array, tensor

    @classmethod
    def of(cls, leaf: Any, mesh: DeviceMesh) -> _Given:
        from torch.distributed.tensor import DTensor, Replicate

        if isinstance(leaf, torch.Tensor):
            if not isinstance(leaf, DTensor):  # one number, the same in every rank
                leaf = DTensor.from_local(leaf, mesh, [Replicate()] * mesh.ndim, run_check=False)
            return cls(TENSOR, dtensor_exchange.to_jax(leaf.detach()), leaf)
        kind, array = sorted_out(leaf)
        return cls(kind, None if array is None else _everywhere(array, mesh))


class _RankCall(torch.autograd.Function):
    """The function in torch's autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, program: RankProgram, arrays: Sequence[jax.Array], *tensors: Any
    ) -> tuple[Any, ...]:
        outputs = program.forward(arrays)
        pulled = program.pulled
        results = program.results(outputs)
        ctx.program = program
        ctx.arrays = [
            array if tensor is None else None for array, tensor in zip(arrays, tensors, strict=True)
        ]
        ctx.placements = [results[number].placements for number in pulled.floating]
        ctx.save_for_backward(*tensors, *program.saved(arrays, results, outputs))
        ctx.set_materialize_grads(False)
        integers = set(range(len(results))) - set(pulled.floating)
        ctx.mark_non_differentiable(*(results[number] for number in sorted(integers)))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        program: RankProgram = ctx.program
        pulled = program.pulled
        saved = ctx.saved_tensors
        tensors, saved = saved[: len(ctx.arrays)], saved[len(ctx.arrays) :]
        given = [
            _redistributed(grads[number], placements, program)
            for number, placements in zip(pulled.floating, ctx.placements, strict=True)
        ]
        operands = [
            array if tensor is None else tensor
            for array, tensor in zip(ctx.arrays, tensors, strict=True)
        ]
        if torch.is_grad_enabled():
            found = _gradient(program)((operands, given), {})
        else:
            found = program.backward(program.kept(operands, saved), given)
        result: list[Any] = [None] * len(tensors)
        for number, gradient in zip(pulled.wanted, found, strict=True):
            result[number] = _placed_as(gradient, tensors[number])
        return (None, None, *result)


def _gradient(program: RankProgram) -> DistributedFunction:
    """The VJP as a function of operands and gradients that can be differentiated."""
    if program.gradient is None:
        what, layouts = f"gradient of {program.name}", program.layouts
        program.gradient = DistributedFunction(program.pulled.gradient, what, layouts)
    return program.gradient


def _redistributed(grad: Any, placements: Sequence[Placement], program: RankProgram) -> Any:
    """A gradient with the placements of its result."""
    if grad is None:
        return None
    if not is_dtensor(grad):
        raise TypeError(
            f"a result of {program.name} is a DTensor, and its gradient must be one too, not a "
            f"{type(grad).__name__} of shape {tuple(grad.shape)}; make it with distribute_tensor "
            "or DTensor.from_local"
        )
    if tuple(grad.placements) == tuple(placements):
        return grad
    return grad.redistribute(program.mesh, placements)


def _placed_as(gradient: DTensor, tensor: DTensor) -> DTensor:
    """The same shards under another name of their layout: a mesh axis of size 1 has several."""
    from torch.distributed.tensor import DTensor

    if gradient.placements == tensor.placements:
        return gradient
    return DTensor.from_local(
        gradient.to_local(),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=gradient.stride(),
    )


def _everywhere(array: Any, mesh: DeviceMesh) -> jax.Array:
    """An array of this process as one that is replicated over the mesh; a global one as it is."""
    whole = NamedSharding(translation.jax_mesh(mesh), P())
    if isinstance(array, jax.Array) and (
        array.sharding.device_set == whole.device_set or not array.is_fully_addressable
    ):
        return array
    pieces = [jax.device_put(array, device) for device in whole.addressable_devices]
    return jax.make_array_from_single_device_arrays(array.shape, whole, pieces)


def _opened(leaf: Any) -> Any:
    return dict(modules.tensors(leaf)) if isinstance(leaf, torch.nn.Module) else leaf
