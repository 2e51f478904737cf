"""A JAX function on plain CPU or CUDA tensors: compiled, called at once, differentiable.

Tensors and arrays cross through DLPack and share their memory where they can:

>>> import jax.numpy as jnp
>>> import isoshard as iso
>>> f = iso.torch_function(lambda x: jnp.sin(x) * 2)
>>> x = torch.zeros(3, requires_grad=True)
>>> y = f(x)
>>> y.sum().backward()
>>> y.device, x.grad
(device(type='cpu'), tensor([2., 2., 2.]))

A CPU tensor is shared if it is contiguous and starts on a 64-byte boundary, which fresh tensors do;
another is copied, which `isoshard.metrics` counts ("copies", "copied_bytes"). `torch_function(..,
copy=False)` raises instead, and `copy=True` always copies. A result is always memory of its own,
on the device of the arguments; one that JAX spread over several devices (by `shard_map`) is
gathered, which is counted ("gathers"). Everything is finished when the call returns, so that an
argument may be overwritten afterwards; torch sees such writes, if they spoil a gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import torch

from isoshard.core.runtime import metrics
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.caches import PROGRAMS, Bounded
from isoshard.core.transfer.exchange import host_to_jax, reshard_array
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.common.argument_types import PyTree
from isoshard.torch_bridge.common.dtypes import logical_dtype
from isoshard.torch_bridge.common.exchange import shard_to_torch, to_numpy
from isoshard.torch_bridge.engine.recording.recorder import recorder

from .flat_vjp import FlatVjp
from .function_reads import Reads
from .jax_operands import TENSOR, classify, of_operands, surroundings


class PlainFunction:
    """A JAX function of plain tensors; see `isoshard.torch_function`.

    Args:
        function: the JAX function.
        name: for messages and reports.
        copy: of arguments, as for `isoshard.to_jax`.
        again: makes a function of any tensors, as `isoshard.torch_function`; of the VJP, so that
            gradients can be differentiated.
        reads: what the function reads, if that may change.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        copy: bool | None,
        again: Callable[..., Callable[..., Any]],
        reads: Reads | None = None,
    ):
        """See the class."""
        self._reads = reads
        self._function, self._name, self._copy, self._again = function, name, copy, again
        self._compiled: Bounded[Any, Compiled] = Bounded(PROGRAMS, "jax_function: plain tensors")

    def __call__(self, leaves: Sequence[Any], structure: PyTree) -> Any:
        """Compute the function.

        Args:
            leaves: of the arguments; the tensors are all on one device, and plain.
            structure: of `(args, kwargs)`.

        Returns:
            The function's result, with tensors on that device for arrays.

        Raises:
            CaptureError: a step is being captured, whose replays would not call it again.
            CopyError: memory cannot be shared under copy=False, or a 64-bit type is off in JAX.
            TypeError: a constant cannot be hashed, a result's dtype is unknown to torch, or JAX
                cannot use the device.
        """
        recorder().refuse(f"the result of {self._name} on plain tensors")
        fixed: list[Any] = []
        tensors: list[torch.Tensor | None] = []
        arrays: list[jax.Array] = []
        for leaf in leaves:
            kind, array = (
                (TENSOR, to_array(leaf, self._copy, f"argument {len(arrays)} of {self._name}"))
                if isinstance(leaf, torch.Tensor)
                else classify(leaf)
            )
            fixed.append(kind)
            if array is not None:
                arrays.append(jnp.asarray(array))
                tensors.append(leaf if isinstance(leaf, torch.Tensor) else None)
        grad = torch.is_grad_enabled()
        needs_grad = tuple(
            [grad and tensor is not None and tensor.requires_grad for tensor in tensors]
        )
        shapes = tuple([(array.shape, array.dtype) for array in arrays])
        version = self._reads and self._reads.version()
        key = (structure, tuple(fixed), shapes, needs_grad, version, *surroundings())
        try:
            compiled = self._compiled.get(key)
        except TypeError as error:
            raise TypeError(
                f"{self._name} takes tensors, arrays and hashable constants: {error}"
            ) from None
        if compiled is None:
            function = of_operands(self._function, structure, fixed)
            with self._reads.tracing() if self._reads else nullcontext():
                compiled = Compiled(function, arrays, needs_grad, self._name, self._again)
            self._compiled[key] = compiled
        if any(needs_grad):
            results = _PlainCall.apply(compiled, arrays, *tensors)
        else:
            results = compiled.results(compiled.forward(*arrays))
        return jax.tree.unflatten(compiled.vjp.structure, results)


class Compiled:
    """A function compiled for operands like these.

    Attributes:
        vjp: the function and its VJP, not compiled.
        forward: takes the operands; gives the results and the rest, finished.
        backward: takes the residuals and the gradients of the floating results.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arrays: Sequence[jax.Array],
        needs_grad: Sequence[bool],
        name: str,
        again: Callable[..., Callable[..., Any]],
    ):
        """Trace the function; the first call compiles it.

        Args:
            function: takes one array per operand.
            arrays: the operands.
            needs_grad: for each operand, whether its gradient is computed.
            name: for messages and reports.
            again: see `PlainFunction`.

        Raises:
            TypeError: a result's dtype is unknown to torch.
        """
        self._name, self._again = name, again
        self._gradient: Callable[..., Any] | None = None
        shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        self.vjp = vjp = FlatVjp(function, shapes, needs_grad)
        for out in vjp.outs:
            try:
                logical_dtype(out.dtype)
            except TypeError as error:
                raise TypeError(f"{name} gives a result that torch cannot hold: {error}") from None
        self.forward = _finished(jax.jit(_unshared(vjp.forward)), name)
        self.backward = _finished(jax.jit(_unshared(vjp.backward)), f"gradient of {name}")

    def results(self, outputs: Sequence[jax.Array]) -> list[torch.Tensor]:
        """The results among the outputs, as tensors over their memory."""
        return [shard_to_torch(_on_single_device(array)) for array in outputs[: len(self.vjp.outs)]]

    def gradient(self) -> Callable[..., Any]:
        """The VJP as a function of operands and gradients that can be differentiated."""
        if self._gradient is None:
            self._gradient = self._again(self.vjp.gradient, name=f"gradient of {self._name}")
        return self._gradient


class _PlainCall(torch.autograd.Function):
    """The function in torch's autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, compiled: Compiled, arrays: Sequence[jax.Array], *tensors: Any
    ) -> tuple[Any, ...]:
        outputs = compiled.forward(*arrays)
        results = compiled.results(outputs)
        vjp = compiled.vjp
        ctx.compiled, ctx.width = compiled, len(tensors)
        ctx.others = [a if t is None else None for a, t in zip(arrays, tensors, strict=True)]
        available = [*arrays, *outputs]
        ctx.residuals = [available[position] for position in vjp.residual_positions]
        # Saved for torch to notice writes to their memory, which the residuals share.
        inside = range(len(arrays), len(arrays) + len(results))
        needed = [
            results[position - len(arrays)]
            for position in vjp.residual_positions
            if position in inside
        ]
        ctx.save_for_backward(*tensors, *needed)
        integers = set(range(len(results))) - set(vjp.floating)
        ctx.mark_non_differentiable(*(results[index] for index in sorted(integers)))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        compiled: Compiled = ctx.compiled
        vjp = compiled.vjp
        tensors = ctx.saved_tensors[: ctx.width]
        cotangents = [grads[index] for index in vjp.floating]
        if torch.is_grad_enabled():
            operands = [
                array if tensor is None else tensor
                for array, tensor in zip(ctx.others, tensors, strict=True)
            ]
            gradients = compiled.gradient()(operands, cotangents)
        else:
            arrays = [to_array(grad, None, "gradient") for grad in cotangents]
            gradients = map(_on_single_device, compiled.backward(ctx.residuals, arrays))
            gradients = [shard_to_torch(gradient) for gradient in gradients]
        input_grads: list[Any] = [None] * ctx.width
        for index, gradient in zip(vjp.argnums, gradients, strict=True):
            input_grads[index] = gradient
        return (None, None, *input_grads)


def to_array(tensor: torch.Tensor, copy: bool | None, name: str) -> jax.Array:
    """A plain tensor's elements in JAX, on the tensor's device.

    Args:
        tensor: on the CPU or a GPU.
        copy: as for `isoshard.to_jax`.
        name: for messages.

    Raises:
        CopyError: as `isoshard.to_jax`.
        TypeError: JAX cannot use the device.
    """
    tensor = tensor.detach()
    if tensor.device.type == "cpu":
        # Where JAX computes on CPUs anyway, the array may move, as for a mesh of several.
        cpu = None if jax.default_backend() == "cpu" else _cpu()
        try:
            return host_to_jax(to_numpy(tensor), cpu, copy=copy, name=name)
        except RuntimeError as error:
            if "storage" not in str(error):
                raise
            raise TypeError(_TRANSFORMED.format(name)) from None
    if tensor.device.type == "lazy":
        raise TypeError(_TRANSFORMED.format(name))
    try:
        array = jnp.from_dlpack(tensor.contiguous() if copy is not False else tensor)
    except (RuntimeError, ValueError) as error:
        raise TypeError(
            f"{name} is on {tensor.device}, which JAX cannot use here ({error}); install JAX for "
            f"that device, or move the tensor with .cpu() or {naming.moving()}"
        ) from None
    return reshard_array(array, None, copy=copy, name=name)


_TRANSFORMED = (
    "{} is a tensor of a transformation of torch (torch.func.grad, vmap, jvp, ..) or of a trace, "
    "which JAX does not see the elements of. Transform the JAX function instead, as in "
    "iso.torch_function(jax.vmap(f)), or differentiate its results with torch.autograd.grad"
)


def _cpu() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])


def _on_single_device(array: jax.Array) -> jax.Array:
    """An array gathered on one of its devices."""
    shards = array.addressable_shards
    if shards[0].data.shape == array.shape:
        return shards[0].data
    metrics.count("gathers")
    return reshard_array(array, jax.sharding.SingleDeviceSharding(shards[0].device))


def _unshared(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same results, each in memory of its own: JAX gives out inputs and constants again."""

    def unshared(*args: Any) -> list[jax.Array]:
        seen = {id(leaf) for leaf in jax.tree.leaves(args)}
        results = []
        for result in function(*args):
            shared = id(result) in seen or not isinstance(result, Tracer)
            results.append(jnp.copy(result) if shared else result)
            seen.add(id(result))
        return results

    return unshared


def _finished(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wait for the results, and report the first call."""
    reported = False

    def finished(*args: Any) -> list[jax.Array]:
        nonlocal reported
        start = time.perf_counter()
        results = jax.block_until_ready(run(*args))
        if not reported:
            seconds = time.perf_counter() - start
            metrics.record_compilation(name, "first call", metrics.user_location(), seconds)
            reported = True
        return results

    return finished
