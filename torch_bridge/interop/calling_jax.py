"""A JAX function, called on torch tensors.

On the `jax` device the call is one entry of the tape, so it is compiled, partitioned and fused with
the torch operations around it, and autograd goes through it by `jax.vjp`:

>>> norm = torch_function(jnp.linalg.norm)
>>> x = torch.tensor([3.0, 4.0], device="jax", requires_grad=True)
>>> norm(x).backward()
>>> x.grad.cpu()
tensor([0.6000, 0.8000])

Arguments and results are pytrees (JAX's notion: dictionaries, tuples, registered dataclasses).
Tensors, `jax.Array`s, NumPy arrays and PRNG keys in them are inputs of the program; everything else
is a constant that the function is traced with, so a number that changes belongs into a tensor. The
function runs once for every new combination of shapes, dtypes and constants. Functions with
`jax.custom_vjp`, `shard_map`, Pallas kernels, integer arguments and results, and gradients of
gradients all work. A result's dtype is JAX's: while `jax_enable_x64` is off, integers are int32.

Plain CPU and CUDA tensors are computed at once, and so are DTensors of many processes, in every
rank: see `plain_tensors` and `dtensor_function` in `isoshard.torch_bridge.interop`. All tensors of
a call are on one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import torch

from isoshard.core.deprecations import accepts_old, keyword
from isoshard.core.layout.leaf_paths import path_name
from isoshard.core.layout.spec import SpecLike
from isoshard.core.runtime.caches import PROGRAMS, Bounded
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.common.dtypes import logical_dtype
from isoshard.torch_bridge.dtensor.dtensor_exchange import is_dtensor
from isoshard.torch_bridge.engine.operators.cpu_fallback import upload
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.recording.memory_log import note_constant
from isoshard.torch_bridge.engine.subprograms import subtrace
from isoshard.torch_bridge.engine.values.value import Aval, Value

from .dtensor_function import DistributedFunction
from .function_reads import Reads
from .jax_operands import TENSOR, classify, of_operands, surroundings
from .operand_types import Types, explained_error, types_of
from .plain_tensors import PlainFunction
from .traced_call import TracedCall
from .transformed_call import TransformedCall, is_transformed


class TorchFunction:
    """A function of torch tensors that a JAX function computes; see `torch_function`.

    Args:
        function: takes arrays.
        name: for error messages and reports.
        out_sharding: as for `torch_function`.
        copy: likewise.
        types: of the operands; True reads them off their Explicit mesh, False traces under Auto.
        reads: whether what the function closes over may change, which traces it anew.
        wide: whether to compute in 64 bits where operands have them; None does as JAX is set.

    Attributes:
        name: as given.

    Example:
        >>> double = torch_function(lambda x: 2 * x, name="double")
        >>> double.name, double(torch.ones(2, device="jax")).tolist()
        ('double', [2.0, 2.0])
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        out_sharding: SpecLike = None,
        copy: bool | None = None,
        *,
        types: bool | Types = False,
        wide: bool | None = None,
        reads: bool = False,
    ):
        """See the class."""
        self.name, self._types, self._wide = name, types, wide
        self.__wrapped__, self._out_sharding = function, out_sharding
        self._reads = Reads(function, name) if reads else None
        self._calls: Bounded[Any, Any] = Bounded(PROGRAMS, "jax_function: recorded calls")
        self._distributed = DistributedFunction(function, name, out_sharding, self._reads)
        self._plain = PlainFunction(function, name, copy, _of_gradient, self._reads)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record the call; on DTensors and plain tensors, compute it.

        Args:
            *args: the JAX function's arguments, with tensors for arrays: all on the `jax` device,
                or all on one other, or DTensors.
            **kwargs: likewise.

        Returns:
            The JAX function's result, with tensors for arrays.

        Raises:
            TypeError: tensors are on several devices, a constant cannot be hashed, or a result's
                dtype is unknown to torch.
            CopyError: plain tensors cannot be shared under copy=False.
            ShardingError: DTensors do not fit together, see
                `isoshard.torch_bridge.interop.dtensor_function`.
        """
        leaves, structure = jax.tree.flatten((args, kwargs))
        if any(map(_is_distributed, leaves)):
            return self._distributed(args, kwargs)
        if any(map(is_transformed, leaves)):
            return self._transformed(leaves, structure)
        self._distributed.log_local_call()
        if self._out_sharding is not None:
            raise TypeError(
                f"{self.name} has out_sharding, which is for DTensors; shard results on the jax "
                "device with isoshard.torch_bridge.mark_sharding"
            )
        plain = [leaf for leaf in leaves if _is_plain(leaf)]
        if plain and not tapes.is_tracing():
            self._check_devices(leaves)
            return self._plain(leaves, structure)
        tensors: list[lazy_tensor.LazyTensor] = []
        fixed = []
        for leaf in leaves:
            fixed.append(self._take(leaf, tensors))
        tensors = subtrace.inside(tensors)
        differentiate = torch.is_grad_enabled()
        needs_grad = tuple([differentiate and tensor.requires_grad for tensor in tensors])
        avals = tuple([tensor._aval for tensor in tensors])
        types: Any = self._types or None
        if types is True:
            types = types_of(tensors, self.name, lambda: _names(args, kwargs))
        wide = bool(jax.config.read("jax_enable_x64")) if self._wide is None else self._wide
        version = self._reads and self._reads.version()
        key = (structure, tuple(fixed), avals, needs_grad, types, wide, version, *surroundings())
        try:
            traced = self._calls.get(key)
        except TypeError as error:
            raise TypeError(
                f"{self.name} takes tensors, arrays and hashable constants: {error}"
            ) from None
        if traced is None:
            function = of_operands(self.__wrapped__, structure, fixed)
            around: list[Any] = []
            try:
                with self._reads.tracing() if self._reads else nullcontext():
                    traced = TracedCall(
                        function, avals, needs_grad, self.name, types, wide, TorchFunction
                    )
                if traced.vjp.holds_tracers and subtrace.is_recording():
                    around, traced = traced.with_operands(function, differentiate)
                    tensors = [*tensors, *around]
            except Exception as error:
                explanation = explained_error(error, types, _names(args, kwargs), self.name)
                if any(needs_grad):
                    explanation.add_note(_NO_GRADIENT.format(self.name))
                if explanation is error:
                    raise
                raise explanation from None
            if not (around or traced.vjp.holds_tracers):
                self._calls[key] = traced
        results = traced(tensors)
        return jax.tree.unflatten(traced.vjp.structure, results[: len(traced.outs)])

    def _transformed(self, leaves: Sequence[Any], structure: Any) -> Any:
        """Call it under transformations of `torch.func`."""
        tensors: list[torch.Tensor] = []
        fixed = []
        for leaf in leaves:
            kind, array = (TENSOR, None) if isinstance(leaf, torch.Tensor) else classify(leaf)
            fixed.append(kind)
            if array is not None:
                tensors.append(_tensor_of(array))
            elif kind is TENSOR:
                tensors.append(leaf)
        key = ("torch.func", structure, tuple(fixed), *surroundings())
        call = self._calls.get(key)
        if call is None:
            wrapped = functools.partial(TorchFunction, types=True, reads=self._reads is not None)
            function = of_operands(self.__wrapped__, structure, fixed)
            call = self._calls[key] = TransformedCall(function, self.name, wrapped)
        return call(*tensors)

    def _take(self, leaf: Any, tensors: list[lazy_tensor.LazyTensor]) -> Any:
        """Append an array or tensor to the operands; returns the argument's kind for the key."""
        if isinstance(leaf, lazy_tensor.LazyTensor):
            tensors.append(leaf)
            return TENSOR
        if isinstance(leaf, torch.Tensor):  # a constant of the trace
            tensors.append(upload(leaf.detach().cpu()))
            return TENSOR
        kind, array = classify(leaf)
        if array is not None:
            tensors.append(_tensor_of(array))
        return kind

    def _check_devices(self, leaves: Sequence[Any]) -> None:
        """Raise for tensors on several devices, and for tensors without values."""
        shapes: dict[torch.device, tuple[int, ...]] = {}
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                shapes.setdefault(leaf.device, tuple(leaf.shape))
        where = ", ".join(f"{device} (shape {shape})" for device, shape in shapes.items())
        if len(shapes) > 1:
            raise TypeError(
                f"{self.name} got tensors on several devices: {where}; move them to one, such as "
                f"with {naming.moving()}"
            )
        if "meta" in where:
            raise TypeError(
                f"{self.name} got tensors without values: {where}; for shapes alone, use "
                "jax.eval_shape on the JAX function"
            )


@accepts_old(keyword("out_specs", "out_sharding"))
def torch_function(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    out_sharding: SpecLike = None,
    copy: bool | None = None,
) -> TorchFunction:
    """Make a JAX function callable on torch tensors.

    Args:
        function: pure, and traceable by `jax.jit`.
        name: for error messages and reports; the function's own name if not given.
        out_sharding: of results that are DTensors, their layouts: a PartitionSpec, a list of
            placements, or None for the compiler's choice; or a tree of those that begins as the
            tree of results does.
        copy: of arguments that are plain CPU or CUDA tensors: None shares their memory where it
            can and copies where it must, which is counted; False raises instead; True copies.
            Tensors on the `jax` device cross as they are.

    Returns:
        A callable, which caches what it has traced.

    Raises:
        TypeError: `function` cannot be called.

    Example:
        >>> sums = torch_function(lambda tree, axis: jax.tree.map(lambda x: x.sum(axis), tree))
        >>> sums({"w": torch.ones(2, 3, device="jax")}, axis=0)["w"].tolist()
        [2.0, 2.0, 2.0]
    """
    if not callable(function):
        raise TypeError(
            f"torch_function takes a function of JAX arrays, not {type(function).__name__}; an "
            "array becomes a tensor with iso.to_torch"
        )
    called = name or getattr(function, "__name__", None) or type(function).__name__
    return TorchFunction(function, called, out_sharding, copy, types=True, reads=True)


def _of_gradient(function: Callable[..., Any], name: str) -> TorchFunction:
    return TorchFunction(function, name, types=True)


def _names(args: Any, kwargs: Any) -> list[str]:
    """The names of the operands; of positional arguments the index."""
    named = [(f"argument {path_name(path)}", x) for path, x in jax.tree.leaves_with_path(args)]
    named += [(path_name(path), x) for path, x in jax.tree.leaves_with_path(kwargs)]
    return [
        name
        for name, leaf in named
        if isinstance(leaf, torch.Tensor) or classify(leaf)[1] is not None
    ]


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, lazy_tensor.LazyTensor)


def _is_distributed(leaf: Any) -> bool:
    """Whether an argument is a DTensor, or a module that has one."""
    if isinstance(leaf, torch.nn.Module):
        return any(map(is_dtensor, leaf.parameters()))
    return is_dtensor(leaf)


def _tensor_of(array: Any) -> lazy_tensor.LazyTensor:
    value = Value.of(jnp.asarray(array), shared=True)
    aval = Aval.contiguous(tuple(array.shape), logical_dtype(value.array.dtype))
    tensor = lazy_tensor.fresh(aval, value)
    note_constant(value)
    return tensor


_NO_GRADIENT = (
    "An argument of {} requires a gradient, so its VJP was traced too. Where the function has "
    "none, call it under torch.no_grad(), or with x.detach()."
)
