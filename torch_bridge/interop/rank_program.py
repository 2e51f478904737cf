"""What a rank runs for a JAX function on DTensors: a compiled forward and a compiled backward."""

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
from isoshard.torch_bridge.interop.flat_vjp import Pulled

from ..dtensor import dtensor_exchange, shard_memory
from ..dtensor.dtensor_exchange import is_dtensor
from ..dtensor.spelling import is_placements
from ..placements import translation

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def subject_of(name: str) -> str:
    """What ranks agree on that are about to compile a function.

    Args:
        name: of the function.
    """
    return f"the program of {name}"


class RankProgram:
    """A function compiled for operands like these.

    Attributes:
        name: of the function.
        mesh: of the DTensors.
        pulled: the function and its VJP, not compiled.
        layouts: of the operands whose gradients are wanted, and so of these.
        gradient: a place for the VJP as a function of DTensors, once it is needed.
    """

    gradient: Any = None

    def __init__(
        self,
        function: Callable[..., Any],
        arrays: Sequence[jax.Array],
        wanted: Sequence[bool],
        mesh: DeviceMesh,
        name: str,
        out_sharding: SpecLike,
    ):
        """Trace and compile.

        Args:
            function: takes one array per operand.
            arrays: the operands.
            wanted: for each operand, whether its gradient is.
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
            self.pulled = Pulled(function, shapes, wanted)
        if self.pulled.holds_tracers:
            raise TypeError(
                f"{name} uses values of a JAX transformation around the call, and DTensors are "
                "computed at once; pass those values as arguments, outside of the transformation"
            )
        self.layouts = [arrays[number].sharding for number in self.pulled.wanted]
        outs = [*self._out_layouts(out_sharding), *([None] * len(self.pulled.rest))]
        self._forward = self._compile(self.pulled.forward, arrays, outs, name)
        self._rest = self._forward.output_shardings[len(self.pulled.outs) :]
        inside = range(len(arrays), len(arrays) + len(self.pulled.outs))
        self._needed = [p - len(arrays) for p in sorted({*self.pulled.kept}) if p in inside]
        self._backward: dict[tuple[bool, ...], Any] = {}

    def forward(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Compute the results and the rest that the VJP needs; they are finished.

        Args:
            arrays: the operands.
        """
        return jax.block_until_ready(self._forward(*arrays))

    def results(self, outputs: Sequence[jax.Array]) -> list[DTensor]:
        """The results among the outputs of `forward`, as DTensors."""
        count = len(self.pulled.outs)
        return [dtensor_exchange.to_dtensor(array, self.mesh) for array in outputs[:count]]

    def saved(
        self, arrays: Sequence[jax.Array], results: Sequence[DTensor], outputs: Sequence[jax.Array]
    ) -> list[torch.Tensor]:
        """What to save for the VJP besides the operands' tensors.

        Torch then frees it after backward, notices writes to it, and gives it to the hooks of
        checkpointing and offloading. The last tensor carries the arrays themselves; one that hooks
        have made anew does not, and `kept` finds them from the tensors.

        Args:
            arrays: the operands.
            results: as DTensors.
            outputs: of `forward`.

        Returns:
            The results that are needed, then local tensors of the rest, and the carrier.
        """
        carrier: Any = torch.empty(0)
        found = [*arrays, *outputs]
        carrier.arrays = [found[place] for place in self.pulled.kept]
        rest = [shard_memory.local_tensor(array) for array in outputs[len(results) :]]
        return [*(results[number] for number in self._needed), *rest, carrier]

    def kept(self, operands: Sequence[Any], saved: Sequence[Any]) -> list[jax.Array]:
        """The arrays that the VJP needs.

        Args:
            operands: DTensors, and arrays where the argument was one.
            saved: what `saved` gave, or what hooks made of it.

        Returns:
            One array for each of `pulled.kept`.
        """
        carried = getattr(saved[-1], "arrays", None)
        if carried is not None:
            return carried
        found = dict(enumerate(operands))
        first_rest = len(operands) + len(self.pulled.outs)
        for number, tensor in zip(self._needed, saved, strict=False):
            found[len(operands) + number] = tensor
        for number, (local, aval, sharding) in enumerate(
            zip(saved[len(self._needed) : -1], self.pulled.rest, self._rest, strict=True)
        ):
            found[first_rest + number] = _whole(local, aval.shape, sharding)
        needed: list[Any] = [found[place] for place in self.pulled.kept]
        for number, one in enumerate(needed):
            if is_dtensor(one):
                needed[number] = dtensor_exchange.to_jax(one.detach())
        return needed

    def backward(self, kept: Sequence[jax.Array], grads: Sequence[DTensor | None]) -> list[DTensor]:
        """The gradients of the wanted operands.

        Args:
            kept: see `kept`.
            grads: of the floating results, with their placements; None stands for zeros.
        """
        arrays = [
            None if grad is None else dtensor_exchange.to_jax(grad.detach()) for grad in grads
        ]
        pattern = tuple(grad is None for grad in grads)
        run = self._backward.get(pattern)
        if run is None:
            what = f"gradient of {self.name}"
            run = self._compile(self.pulled.backward, (list(kept), arrays), self.layouts, what)
            self._backward[pattern] = run
        found = jax.block_until_ready(run(list(kept), arrays))
        return [dtensor_exchange.to_dtensor(array, self.mesh) for array in found]

    def _compile(
        self, function: Callable[..., Any], arguments: Sequence[Any], outs: Any, what: str
    ) -> Any:
        start = time.perf_counter()
        with _current(self._jax_mesh):
            traced = jax.jit(function, out_shardings=outs).trace(*arguments)
            lowered = traced.lower()
            self._agree(what, arguments, lowered.as_text())
            platform = self._jax_mesh.devices.flat[0].platform
            compiled = lowered.compile(cpu_compiler.options(traced.jaxpr, platform))
        metrics.record_compilation(
            what, "first call", metrics.user_location(), time.perf_counter() - start
        )
        return compiled

    def _agree(self, what: str, arguments: Sequence[Any], program: str) -> None:
        """Make sure that all ranks run this very program; another one's collectives would hang."""
        given = [f"{a.dtype}{list(a.shape)} {a.sharding.spec}" for a in jax.tree.leaves(arguments)]
        said = (
            f"{', '.join(given)}; gradients of operands {self.pulled.wanted}; program "
            f"{hashlib.sha256(program.encode()).hexdigest()[:16]}"
        )
        assert_equal(subject_of(what), said, self.mesh.mesh.flatten().tolist())

    def _out_layouts(self, out_sharding: Any) -> list[NamedSharding | None]:
        count = len(self.pulled.outs)
        if out_sharding is None:
            return [None] * count
        tree = jax.tree.unflatten(self.pulled.structure, range(count))
        try:
            specs = jax.tree.leaves(
                jax.tree.broadcast(out_sharding, tree, is_leaf=_is_spec), is_leaf=_is_spec
            )
        except ValueError as error:
            raise ShardingError(
                f"out_sharding of {self.name} must be one spec or a tree of them that begins as "
                f"the tree of its results, {self.pulled.structure}, does: {error}"
            ) from None
        return [self._layout(spec, number) for number, spec in enumerate(specs)]

    def _layout(self, spec: Any, number: int) -> NamedSharding | None:
        shape = tuple(self.pulled.outs[number].shape)
        name = f"result {number} of {self.name}"
        if spec is None or isinstance(spec, NamedSharding):
            return spec
        if isinstance(spec, P):
            return named_sharding(spec, self._jax_mesh, len(shape), shape=shape, name=name)
        layout = translation.layout_of(tuple(spec), self.mesh, shape)
        if not layout.is_even:
            raise UnevenError(f"{name}: placements {spec} do not split {shape} evenly")
        if any(placement.is_partial() for placement in spec):
            raise UnrepresentableError(f"{name}: XLA gives sums taken, not {spec}")
        return layout.sharding


def _whole(local: torch.Tensor, shape: tuple[int, ...], sharding: Any) -> jax.Array:
    """The array that a local tensor is this rank's shard of."""
    (device,) = sharding.addressable_devices
    piece = shard_memory.shard_of(local, device, None, "saved tensor")
    return jax.make_array_from_single_device_arrays(shape, sharding, [piece])


def _current(mesh: jax.sharding.Mesh) -> contextlib.AbstractContextManager[Any]:
    """Make a mesh JAX's current one, unless the caller has one."""
    if jax.sharding.get_abstract_mesh().empty:
        return jax.set_mesh(mesh)
    return contextlib.nullcontext()


def _is_spec(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, P | NamedSharding) or is_placements(leaf)
