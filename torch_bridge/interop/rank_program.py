"""The program of each rank for a JAX function on DTensors: a compiled forward and backward."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError, UnevenError, UnrepresentableError
from isoshard.core.layout.spec import SpecLike, named_sharding
from isoshard.core.processes.agreement import assert_equal
from isoshard.core.runtime import cpu_compiler, metrics
from isoshard.torch_bridge.interop.flat_vjp import FlatVjp

from ..dtensor import dtensor_exchange, shard_memory
from ..dtensor.dtensor_exchange import is_dtensor
from ..dtensor.spelling import is_placements
from ..placements import translation

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def subject_of(name: str) -> str:
    """The subject of the agreement between ranks that are about to compile a function."""
    return f"the program of {name}"


class RankProgram:
    """A function compiled for operands like these.

    Attributes:
        name: of the function.
        mesh: of the DTensors.
        vjp: the function and its VJP, not compiled.
        layouts: of the operands `vjp.argnums`, and so of their gradients.
        gradient: the VJP as a function of DTensors, once it is needed.
    """

    gradient: Any = None

    def __init__(
        self,
        function: Callable[..., Any],
        arrays: Sequence[jax.Array],
        needs_grad: Sequence[bool],
        mesh: DeviceMesh,
        name: str,
        out_sharding: SpecLike,
    ):
        """Trace and compile.

        Args:
            function: takes one array per operand.
            arrays: the operands.
            needs_grad: for each operand, whether its gradient is computed.
            mesh: of the DTensors.
            name: of the function, for messages and reports.
            out_sharding: see `isoshard.torch_function`.

        Raises:
            DistributedError: the ranks are about to run different programs.
            ShardingError: `out_sharding` does not fit the results.
            TypeError: the function uses values of a JAX transformation around it.
        """
        self.name, self.mesh = name, mesh
        self._jax_mesh = translation.jax_mesh(mesh)
        shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        with _current(self._jax_mesh):
            self.vjp = FlatVjp(function, shapes, needs_grad)
        if self.vjp.holds_tracers:
            raise TypeError(
                f"{name} uses values of a JAX transformation around the call, and DTensors are "
                "computed at once; pass those values as arguments, outside of the transformation"
            )
        self.layouts = [arrays[index].sharding for index in self.vjp.argnums]
        outs = [*self._out_layouts(out_sharding), *([None] * len(self.vjp.rest))]
        self._forward = self._compile(self.vjp.forward, arrays, outs, name)
        self._rest = self._forward.output_shardings[len(self.vjp.outs) :]
        inside = range(len(arrays), len(arrays) + len(self.vjp.outs))
        self._needed = [
            p - len(arrays) for p in sorted({*self.vjp.residual_positions}) if p in inside
        ]
        self._backward: dict[tuple[bool, ...], Any] = {}

    def forward(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Compute the results and the rest that the VJP needs; they are finished."""
        return jax.block_until_ready(self._forward(*arrays))

    def results(self, outputs: Sequence[jax.Array]) -> list[DTensor]:
        """The results among the outputs of `forward`, as DTensors."""
        count = len(self.vjp.outs)
        return [dtensor_exchange.to_dtensor(array, self.mesh) for array in outputs[:count]]

    def saved(
        self, arrays: Sequence[jax.Array], results: Sequence[DTensor], outputs: Sequence[jax.Array]
    ) -> list[torch.Tensor]:
        """What to save for the VJP besides the operands' tensors.

        Torch then frees it after backward, notices writes to it, and gives it to the hooks of
        checkpointing and offloading. The last tensor carries the arrays themselves; one that hooks
        have made anew does not, and `residuals` finds them from the tensors.

        Args:
            arrays: the operands.
            results: as DTensors.
            outputs: of `forward`.

        Returns:
            The results that are needed, then local tensors of the rest, and the carrier.
        """
        carrier: Any = torch.empty(0)
        available = [*arrays, *outputs]
        carrier.arrays = [available[position] for position in self.vjp.residual_positions]
        rest = [shard_memory.local_tensor(array) for array in outputs[len(results) :]]
        return [*(results[index] for index in self._needed), *rest, carrier]

    def residuals(self, operands: Sequence[Any], saved: Sequence[Any]) -> list[jax.Array]:
        """The arrays that the VJP needs.

        Args:
            operands: DTensors, and arrays where the argument was one.
            saved: what `saved` gave, or what hooks made of it.

        Returns:
            One array for each of `vjp.residual_positions`.
        """
        carried = getattr(saved[-1], "arrays", None)
        if carried is not None:
            return carried
        available = dict(enumerate(operands))
        first_rest = len(operands) + len(self.vjp.outs)
        for index, tensor in zip(self._needed, saved, strict=False):
            available[len(operands) + index] = tensor
        for index, (local, aval, sharding) in enumerate(
            zip(saved[len(self._needed) : -1], self.vjp.rest, self._rest, strict=True)
        ):
            available[first_rest + index] = _array_of_local(local, aval.shape, sharding)
        residuals: list[Any] = [available[position] for position in self.vjp.residual_positions]
        for index, residual in enumerate(residuals):
            if is_dtensor(residual):
                residuals[index] = dtensor_exchange.to_jax(residual.detach())
        return residuals

    def backward(
        self, residuals: Sequence[jax.Array], grads: Sequence[DTensor | None]
    ) -> list[DTensor]:
        """The gradients of the operands `vjp.argnums`.

        Args:
            residuals: as the method `residuals` returns them.
            grads: of the floating results, with their placements; None stands for zeros.
        """
        arrays = [
            None if grad is None else dtensor_exchange.to_jax(grad.detach()) for grad in grads
        ]
        pattern = tuple(grad is None for grad in grads)
        run = self._backward.get(pattern)
        if run is None:
            name = f"gradient of {self.name}"
            run = self._compile(self.vjp.backward, (list(residuals), arrays), self.layouts, name)
            self._backward[pattern] = run
        gradients = jax.block_until_ready(run(list(residuals), arrays))
        return [dtensor_exchange.to_dtensor(array, self.mesh) for array in gradients]

    def _compile(
        self, function: Callable[..., Any], arguments: Sequence[Any], outs: Any, name: str
    ) -> Any:
        start = time.perf_counter()
        with _current(self._jax_mesh):
            traced = jax.jit(function, out_shardings=outs).trace(*arguments)
            lowered = traced.lower()
            self._check_all_ranks(name, arguments, lowered.as_text())
            platform = self._jax_mesh.devices.flat[0].platform
            compiled = lowered.compile(cpu_compiler.options(traced.jaxpr, platform))
        metrics.record_compilation(
            name, "first call", metrics.user_location(), time.perf_counter() - start
        )
        return compiled

    def _check_all_ranks(self, name: str, arguments: Sequence[Any], program: str) -> None:
        """Check that all ranks run the same program; the collectives of another would hang."""
        operands = [
            f"{a.dtype}{list(a.shape)} {a.sharding.spec}" for a in jax.tree.leaves(arguments)
        ]
        description = (
            f"{', '.join(operands)}; gradients of operands {self.vjp.argnums}; program "
            f"{hashlib.sha256(program.encode()).hexdigest()[:16]}"
        )
        assert_equal(subject_of(name), description, self.mesh.mesh.flatten().tolist())

    def _out_layouts(self, out_sharding: Any) -> list[NamedSharding | None]:
        count = len(self.vjp.outs)
        if out_sharding is None:
            return [None] * count
        tree = jax.tree.unflatten(self.vjp.structure, range(count))
        try:
            specs = jax.tree.leaves(
                jax.tree.broadcast(out_sharding, tree, is_leaf=_is_spec), is_leaf=_is_spec
            )
        except ValueError as error:
            raise ShardingError(
                f"out_sharding of {self.name} must be one spec or a tree of them that begins as "
                f"the tree of its results, {self.vjp.structure}, does: {error}"
            ) from None
        return [self._layout(spec, index) for index, spec in enumerate(specs)]

    def _layout(self, spec: Any, index: int) -> NamedSharding | None:
        shape = tuple(self.vjp.outs[index].shape)
        name = f"result {index} of {self.name}"
        if spec is None or isinstance(spec, NamedSharding):
            return spec
        if isinstance(spec, P):
            return named_sharding(spec, self._jax_mesh, len(shape), shape=shape, name=name)
        layout = translation.layout_of(tuple(spec), self.mesh, shape)
        if not layout.is_even:
            raise UnevenError(f"{name}: placements {spec} do not split {shape} evenly")
        if any(placement.is_partial() for placement in spec):
            raise UnrepresentableError(f"{name}: XLA returns reduced values, not {spec}")
        return layout.sharding


def _array_of_local(local: torch.Tensor, shape: tuple[int, ...], sharding: Any) -> jax.Array:
    """The array that a local tensor is this rank's shard of."""
    (device,) = sharding.addressable_devices
    shard = shard_memory.shard_of(local, device, None, "saved tensor")
    return jax.make_array_from_single_device_arrays(shape, sharding, [shard])


def _current(mesh: jax.sharding.Mesh) -> contextlib.AbstractContextManager[Any]:
    """Make a mesh JAX's current one, unless the caller has one."""
    if jax.sharding.get_abstract_mesh().empty:
        return jax.set_mesh(mesh)
    return contextlib.nullcontext()


def _is_spec(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, P | NamedSharding) or is_placements(leaf)
