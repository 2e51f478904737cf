"""A JAX function, called on DTensors: in every rank one compiled program, and one for its gradient.

    block = iso.torch_function(jax_block)            # in every rank, under torchrun
    y = block(dict(module.named_parameters()), x)     # DTensors in, DTensors out
    y.sum().backward()                                # gradients, placed as their tensors

The DTensors cross without a copy, as `isoshard.to_jax` does it. The function is jitted over their
mesh, so it sees global arrays and XLA inserts the collectives; while it is traced the mesh is JAX's
current one, and `jax.lax.with_sharding_constraint(h, P("dp", "tp"))` and `jax.shard_map` find it.
Results are DTensors with the placements that XLA chose, or those of `out_sharding`.

Gradients follow torch's rules. Residuals are saved, not computed again. A gradient has
the placements of its tensor, so that of a replicated one is summed already. A gradient that
arrives with other placements than its result, Partial among them, is redistributed first, by
DTensor itself; one without memory of its own, as that of a sum, is copied (and counted). Gradients
of gradients are functions called in the same way.

All ranks of the mesh must make the same calls in the same order, as for every collective. Before a
program is compiled they compare what they are about to run, and all raise if it is not the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
from isoshard.core.runtime.caches import PROGRAMS, Bounded, cached
from isoshard.torch_bridge.dtensor import dtensor_exchange
from isoshard.torch_bridge.dtensor.dtensor_exchange import is_dtensor
from isoshard.torch_bridge.dtensor.routes import TO_JAX
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.modules import modules
from isoshard.torch_bridge.placements import translation

from .function_reads import Reads
from .jax_operands import TENSOR, classify, of_operands, surroundings
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
        self._programs: Bounded[Any, RankProgram] = Bounded(PROGRAMS, "jax_function: DTensors")
        self._local_call = partial("{}: tensors of its own".format, name)

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Compute the function in every rank of the mesh.

        Args:
            args: the JAX function's arguments, with DTensors for arrays. A module stands for the
                dictionary of its parameters and buffers.
            kwargs: likewise.

        Raises:
            TypeError: a tensor is no DTensor, or a constant cannot be hashed.
            ShardingError: DTensors are on different meshes, are split unevenly, or are Partial;
                all of them in one message.
            DistributedError: the ranks are about to run different programs.
        """
        args, kwargs = jax.tree.map(_tensors_by_name, (tuple(args), kwargs))
        leaves, structure = jax.tree.flatten((args, kwargs))
        mesh = next(leaf.device_mesh for leaf in leaves if is_dtensor(leaf))
        try:
            _check_arguments(self.name, mesh, leaves, (args, kwargs))
        except (ShardingError, TypeError) as error:
            if not self._programs:  # the other ranks compile, and compare programs
                report_error(f"the call of {self.name}", error, mesh.mesh.flatten().tolist())
            raise
        operands = [_Operand.of(leaf, mesh) for leaf in leaves]
        fixed = tuple([operand.kind for operand in operands])
        operands = [operand for operand in operands if operand.array is not None]
        arrays = [operand.array for operand in operands]
        tensors = [operand.tensor for operand in operands]
        differentiate = torch.is_grad_enabled()
        needs_grad = tuple([differentiate and t is not None and t.requires_grad for t in tensors])
        avals = tuple([(array.shape, array.dtype, array.sharding) for array in arrays])
        version = self._reads and self._reads.version()
        key = (structure, fixed, avals, needs_grad, mesh, version, *surroundings())
        try:
            program = self._programs.get(key)
        except TypeError as error:
            raise TypeError(
                f"{self.name} takes DTensors, arrays and hashable constants: {error}"
            ) from None
        if program is None:
            flat = of_operands(self._function, structure, fixed)
            try:
                with self._reads.tracing() if self._reads else nullcontext():
                    program = RankProgram(
                        flat, arrays, needs_grad, mesh, self.name, self._out_sharding
                    )
            except DistributedError:
                raise  # from the comparison, so all ranks have it
            except Exception as error:
                report_error(subject_of(self.name), error, mesh.mesh.flatten().tolist())
                raise
            self._programs[key] = program
        else:
            log_call(subject_of(self.name), partial(_as_before, avals))
        if any(needs_grad):
            results = _RankCall.apply(program, arrays, *tensors)
        else:
            results = program.results(program.forward(arrays))
        return jax.tree.unflatten(program.vjp.structure, results)

    def log_local_call(self) -> None:
        """Log a call without DTensors, for ranks that wait for this one in a call with some."""
        for subject in (TO_JAX, subject_of(self.name)):
            log_call(subject, self._local_call)


def _as_before(avals: Sequence[Any]) -> str:
    return "DTensors as before, " + ", ".join(f"{tuple(aval[0])} of {aval[1]}" for aval in avals)


class _Operand:
    """One argument: its kind, its array, and the DTensor whose array that is."""

    __slots__ = ("array", "kind", "tensor")

    def __init__(self, kind: Any, array: Any, tensor: Any = None):
        self.kind, self.array, self.tensor = kind, array, tensor

    @classmethod
    def of(cls, leaf: Any, mesh: DeviceMesh) -> _Operand:
        from torch.distributed.tensor import DTensor, Replicate

        if isinstance(leaf, torch.Tensor):
            if not isinstance(leaf, DTensor):  # one number, the same in every rank
                leaf = DTensor.from_local(leaf, mesh, [Replicate()] * mesh.ndim, run_check=False)
            return cls(TENSOR, dtensor_exchange.to_jax(leaf.detach()), leaf)
        kind, array = classify(leaf)
        return cls(kind, None if array is None else _replicated(array, mesh))


class _RankCall(torch.autograd.Function):
    """The function in torch's autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, program: RankProgram, arrays: Sequence[jax.Array], *tensors: Any
    ) -> tuple[Any, ...]:
        outputs = program.forward(arrays)
        vjp = program.vjp
        results = program.results(outputs)
        ctx.program = program
        ctx.arrays = [
            array if tensor is None else None for array, tensor in zip(arrays, tensors, strict=True)
        ]
        ctx.placements = [results[index].placements for index in vjp.floating]
        ctx.save_for_backward(*tensors, *program.saved(arrays, results, outputs))
        ctx.set_materialize_grads(False)
        integers = set(range(len(results))) - set(vjp.floating)
        ctx.mark_non_differentiable(*(results[index] for index in sorted(integers)))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        program: RankProgram = ctx.program
        vjp = program.vjp
        saved = ctx.saved_tensors
        tensors, saved = saved[: len(ctx.arrays)], saved[len(ctx.arrays) :]
        cotangents = [
            _redistributed(grads[index], placements, program)
            for index, placements in zip(vjp.floating, ctx.placements, strict=True)
        ]
        operands = [
            array if tensor is None else tensor
            for array, tensor in zip(ctx.arrays, tensors, strict=True)
        ]
        if torch.is_grad_enabled():
            gradients = _gradient(program)((operands, cotangents), {})
        else:
            gradients = program.backward(program.residuals(operands, saved), cotangents)
        input_grads: list[Any] = [None] * len(tensors)
        for index, gradient in zip(vjp.argnums, gradients, strict=True):
            input_grads[index] = _placed_as(gradient, tensors[index])
        return (None, None, *input_grads)


def _gradient(program: RankProgram) -> DistributedFunction:
    """The VJP as a function of operands and gradients that can be differentiated."""
    if program.gradient is None:
        name, layouts = f"gradient of {program.name}", program.layouts
        program.gradient = DistributedFunction(program.vjp.gradient, name, layouts)
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


def _replicated(array: Any, mesh: DeviceMesh) -> jax.Array:
    """An array of this process as one that is replicated over the mesh; a global one as it is."""
    sharding = NamedSharding(translation.jax_mesh(mesh), P())
    if isinstance(array, jax.Array) and (
        array.sharding.device_set == sharding.device_set or not array.is_fully_addressable
    ):
        return array
    shards = [jax.device_put(array, device) for device in sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def _tensors_by_name(leaf: Any) -> Any:
    return dict(modules.tensors(leaf)) if isinstance(leaf, torch.nn.Module) else leaf


def _check_arguments(name: str, mesh: DeviceMesh, leaves: Iterable[Any], tree: Any) -> None:
    """Check that all tensors can be computed with together.

    A plain tensor of one element may be among DTensors, as in DTensor's own operations.

    Args:
        name: of the function that is called.
        mesh: of the first DTensor.
        leaves: the arguments.
        tree: the same as `(args, kwargs)`, for messages.

    Raises:
        ShardingError: DTensors are on different meshes, have no shard in this rank, are split
            unevenly, or are Partial.
        TypeError: other tensors are among them. All errors are in one message.
    """
    if not any(isinstance(leaf, torch.Tensor) and _argument_error(leaf, mesh) for leaf in leaves):
        return
    errors = []
    kind: type[Exception] = ShardingError
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        error = _argument_error(leaf, mesh) if isinstance(leaf, torch.Tensor) else ""
        if error:
            errors.append(f"argument {jax.tree_util.keystr(path[1:])} {error}")
            kind = kind if is_dtensor(leaf) else TypeError
    raise kind(f"{name} is called with DTensors on {mesh}, but " + "; ".join(errors))


def _argument_error(leaf: torch.Tensor, mesh: DeviceMesh) -> str:
    """Why a tensor cannot be an argument, and how to fix it; empty if it can."""
    if isinstance(leaf, lazy_tensor.LazyTensor):
        return (
            "is a tensor on the jax device of this process, which cannot be combined with DTensors "
            "of many processes; use one kind"
        )
    if not is_dtensor(leaf):
        if leaf.numel() == 1:
            return ""
        return (
            f"is a plain tensor of shape {tuple(leaf.shape)} on {leaf.device}, without placements; "
            "use distribute_tensor(x, mesh, [Replicate(), ..]), or DTensor.from_local"
        )
    return _layout_error(leaf.device_mesh, leaf.placements, leaf.shape, mesh)


@cached(4096)
def _layout_error(
    mesh_of_x: DeviceMesh, placements: tuple[Placement, ...], size: torch.Size, mesh: DeviceMesh
) -> str:
    shape = tuple(size)
    if mesh_of_x != mesh:
        return (
            f"is on {mesh_of_x}; DTensors of one call share one mesh (from a slice of it: "
            "DTensor.from_local(x.to_local(), mesh, [Replicate(), ..]))"
        )
    if mesh.get_coordinate() is None:
        return "has no shard in this rank, which is outside the mesh; call it in the mesh's ranks"
    if any(placement.is_partial() for placement in placements):
        return (
            f"has placements {placements}: values that are not reduced yet; reduce them with "
            "x.redistribute(placements=[Replicate(), ..])"
        )
    if not translation.layout_of(placements, mesh, shape).is_even:
        return (
            f"has shape {shape}, which placements {placements} split unevenly; pad it, or "
            "redistribute it to Replicate()"
        )
    return ""
