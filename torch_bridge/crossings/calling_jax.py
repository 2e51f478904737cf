"""A JAX function, called on torch tensors.

On the `jax` device the call is one entry of the tape, so it is compiled, partitioned and fused with
the torch operations around it, and autograd goes through it by `jax.vjp`:

>>> import jax.numpy as jnp
>>> import torch, isoshard.torch_bridge
>>> norm = torch_function(lambda x, axis=-1: jnp.sqrt(jnp.sum(x * x, axis)))
>>> x = torch.tensor([[3.0, 4.0]], device="jax", requires_grad=True)
>>> y = norm(x, axis=1)
>>> y
tensor([5.], device='jax:0', grad_fn=<_CallBackward>)
>>> y.sum().backward()
>>> x.grad
tensor([[0.6000, 0.8000]], device='jax:0')

Arguments and results are pytrees (JAX's notion: dictionaries, tuples, dataclasses that JAX knows).
Tensors, `jax.Array`s, NumPy arrays and PRNG keys in them are inputs of the program; everything else
is a constant that the function is traced with, so a number that changes belongs into a tensor. The
function runs once for every new combination of shapes, dtypes and constants. Functions with
`jax.custom_vjp`, `shard_map`, Pallas kernels, integer arguments and results, and gradients of
gradients all work. A result's dtype is JAX's: while `jax_enable_x64` is off, integers are int32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun

from isoshard.torch_bridge.dtypes import logical_dtype
from isoshard.torch_bridge.engine import aside, base
from isoshard.torch_bridge.engine import tape as tapes
from isoshard.torch_bridge.engine.tape import Recipe
from isoshard.torch_bridge.engine.value import Aval, Value


class TorchFunction:
    """A function of torch tensors that a JAX function computes; see `torch_function`.

    Attributes:
        name: for error messages and reports.
    """

    def __init__(self, function: Callable[..., Any], name: str):
        """See `torch_function`."""
        self.name = name
        self._function = function
        self._known: dict[Any, _Traced] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record the call.

        Args:
            *args: the JAX function's arguments, with tensors on the `jax` device for arrays.
            **kwargs: likewise.

        Returns:
            The JAX function's result, with tensors for arrays.

        Raises:
            TypeError: a tensor is on another device, a constant cannot be hashed, or a result's
                dtype is unknown to torch.
        """
        leaves, structure = jax.tree.flatten((args, kwargs))
        tensors: list[base.LazyTensor] = []
        fixed = []
        for leaf in leaves:
            fixed.append(self._take(leaf, tensors))
        tensors = aside.inside(tensors)
        differentiate = torch.is_grad_enabled()
        wanted = tuple([differentiate and tensor.requires_grad for tensor in tensors])
        avals = tuple([tensor._aval for tensor in tensors])
        key = (structure, tuple(fixed), avals, wanted, *_surroundings())
        try:
            traced = self._known.get(key)
        except TypeError as error:
            raise TypeError(
                f"{self.name} takes tensors, arrays and hashable constants: {error}"
            ) from None
        if traced is None:
            traced = _Traced(self._flat(structure, fixed), avals, wanted, self.name)
            if not traced.holds_tracers:
                self._known[key] = traced
        results = _Call.apply(traced, *tensors) if any(wanted) else traced.record(tensors)
        return jax.tree.unflatten(traced.structure, results[: len(traced.outs)])

    def _take(self, leaf: Any, tensors: list[base.LazyTensor]) -> Any:
        """Put an array or tensor among the operands; returns what is fixed of the argument."""
        if isinstance(leaf, base.LazyTensor):
            tensors.append(leaf)
            return _TENSOR
        if isinstance(leaf, torch.Tensor):
            raise TypeError(
                f"{self.name} is a JAX function and takes tensors on the jax device, not one of "
                f"shape {tuple(leaf.shape)} on {leaf.device}; move it with .to('jax')"
            )
        if isinstance(leaf, torch.dtype):
            from isoshard.torch_bridge.dtypes import physical_dtype

            return _Constant(physical_dtype(leaf))
        if not isinstance(leaf, jax.Array | np.ndarray):
            return _Constant(leaf)
        keys = None
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            keys = str(jax.random.key_impl(leaf))
            leaf = jax.random.key_data(leaf)
        tensors.append(_tensor_of(leaf))
        return _Operand(keys)

    def _flat(self, structure: Any, fixed: Sequence[Any]) -> Callable[..., Any]:
        """The function of its operands alone."""

        def flat(*arrays: jax.Array) -> Any:
            rest = iter(arrays)
            args, kwargs = jax.tree.unflatten(structure, [one.value(rest) for one in fixed])
            return self._function(*args, **kwargs)

        return flat


def torch_function(function: Callable[..., Any], *, name: str | None = None) -> TorchFunction:
    """Make a JAX function callable on torch tensors.

    Args:
        function: pure, and traceable by `jax.jit`.
        name: for error messages and reports; the function's own name if not given.

    Returns:
        A callable. Keep it: it remembers what it has traced.
    """
    if not callable(function):
        raise TypeError(f"torch_function takes a JAX function, not {type(function).__name__}")
    return TorchFunction(function, name or getattr(function, "__name__", type(function).__name__))


@dataclasses.dataclass(frozen=True)
class _Operand:
    """An argument that is an input of the program; `keys` names the kind of PRNG keys it holds."""

    keys: str | None = None

    def value(self, arrays: Any) -> Any:
        array = next(arrays)
        return array if self.keys is None else jax.random.wrap_key_data(array, impl=self.keys)


_TENSOR = _Operand()


@dataclasses.dataclass(frozen=True, eq=False)
class _Constant:
    """An argument that the function is traced with; 1, 1.0 and True are different ones."""

    constant: Any

    def value(self, arrays: Any) -> Any:
        return self.constant

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Constant)
            and type(self.constant) is type(other.constant)
            and self.constant == other.constant
        )

    def __hash__(self) -> int:
        return hash(self.constant)


def _surroundings() -> tuple[Hashable, ...]:
    """Settings of JAX that tracing depends on (x64 is part of every aval)."""
    config: Any = jax.config
    return (
        config.jax_default_matmul_precision,
        config.jax_numpy_dtype_promotion,
        jax.sharding.get_abstract_mesh(),
    )


def _tensor_of(array: Any) -> base.LazyTensor:
    value = Value.of(jnp.asarray(array), shared=True)
    aval = Aval.contiguous(tuple(array.shape), logical_dtype(value.array.dtype))
    tensor = base.fresh(aval, value)
    base.note_constant(value)
    return tensor


class _Traced:
    """A function traced for operands like these.

    Attributes:
        outs: the aval of each result.
        structure: how the results are nested.
        floating: numbers of the results that have gradients.
        wanted: numbers of the operands whose gradients are wanted.
        forward: takes the operands; gives the results, and what backward needs besides operands
            and results.
        backward: takes what `kept` names and the gradients of the floating results; gives the
            gradients of the wanted operands.
        kept: for each input of the pull-back, where it is among operands, results and the rest.
        rest: the avals of that rest.
        holds_tracers: the function uses values of a JAX trace around it.
    """

    backward: Recipe
    structure: Any

    def __init__(
        self,
        function: Callable[..., Any],
        avals: Sequence[Aval],
        wanted: Sequence[bool],
        name: str,
    ):
        """Trace the function, and its pull-back if a gradient is wanted."""
        self._function, self._name = function, name
        self.wanted = [number for number, want in enumerate(wanted) if want]
        self._pull: Any = None
        self._gradient: TorchFunction | None = None
        shapes = [jax.ShapeDtypeStruct(*aval.token) for aval in avals]
        traced = jax.make_jaxpr(self._forward)(*shapes)
        self.holds_tracers = any(isinstance(const, Tracer) for const in traced.consts)
        jaxpr = traced.jaxpr
        count = self.structure.num_leaves
        self.outs = [self._out_aval(var.aval) for var in jaxpr.outvars[:count]]
        self.floating = [n for n, out in enumerate(self.outs) if _has_gradients(out)]
        places = {id(var): n for n, var in enumerate((*jaxpr.invars, *jaxpr.outvars[:count]))}
        self.kept: list[int] = []
        chosen = list(range(count))
        for number, var in enumerate(jaxpr.outvars[count:], count):
            if id(var) not in places:
                places[id(var)] = len(avals) + len(chosen)
                chosen.append(number)
            self.kept.append(places[id(var)])
        self.rest = [self._out_aval(jaxpr.outvars[number].aval) for number in chosen[count:]]
        compute = jaxpr_as_fun(traced)

        def run(arrays: Any, _scalars: Any, _key: Any) -> Any:
            results = compute(*arrays)
            return [results[number] for number in chosen]

        self.forward = Recipe(name, run, len(chosen))
        if self.wanted:
            self.backward = Recipe(f"gradient of {name}", self._backward, len(self.wanted))

    def _out_aval(self, aval: Any) -> Aval:
        try:
            return Aval.contiguous(tuple(aval.shape), logical_dtype(aval.dtype))
        except TypeError as error:
            raise TypeError(
                f"{self._name} gives a result that torch cannot hold: {error}"
            ) from None

    def _forward(self, *arrays: jax.Array) -> list[Any]:
        """The results, and what the pull-back needs."""

        def of_wanted(*chosen: jax.Array) -> Any:
            given = list(arrays)
            for number, array in zip(self.wanted, chosen, strict=True):
                given[number] = array
            results, self.structure = jax.tree.flatten(self._function(*given))
            return [jnp.asarray(result) for result in results]

        if not self.wanted:
            return of_wanted()
        results, pull = jax.vjp(of_wanted, *(arrays[number] for number in self.wanted))
        needed, self._pull = jax.tree.flatten(pull)
        return [*results, *needed]

    def _backward(self, arrays: Sequence[Any], _scalars: Any, _key: Any) -> list[jax.Array]:
        pull = jax.tree.unflatten(self._pull, arrays[: len(self.kept)])
        return _gradients(pull, self.outs, arrays[len(self.kept) :])

    def record(self, tensors: Sequence[Any]) -> list[base.LazyTensor]:
        """Put the function on the tape; gives its results and the rest."""
        values = tapes.recorder().record(self.forward, [base.read(tensor) for tensor in tensors])
        return [
            base.fresh(aval, value)
            for aval, value in zip((*self.outs, *self.rest), values, strict=True)
        ]

    def gradient(self) -> TorchFunction:
        """The pull-back as a function of operands and gradients that can be differentiated."""
        if self._gradient is None:

            def gradient(arrays: Sequence[jax.Array], grads: Sequence[jax.Array]) -> Any:
                def of_wanted(*chosen: jax.Array) -> Any:
                    given = list(arrays)
                    for number, array in zip(self.wanted, chosen, strict=True):
                        given[number] = array
                    leaves = jax.tree.leaves(self._function(*given))
                    return [jnp.asarray(leaf) for leaf in leaves]

                _, pull = jax.vjp(of_wanted, *(arrays[number] for number in self.wanted))
                return _gradients(pull, self.outs, grads)

            self._gradient = TorchFunction(gradient, f"gradient of {self._name}")
        return self._gradient


class _Call(torch.autograd.Function):
    """The function in torch's autograd graph."""

    @staticmethod
    def forward(ctx: Any, traced: _Traced, *tensors: Any) -> tuple[Any, ...]:
        outputs = traced.record(tensors)
        results, rest = outputs[: len(traced.outs)], outputs[len(traced.outs) :]
        ctx.traced = traced
        ctx.width = len(tensors)
        ctx.save_for_backward(*tensors, *results, *rest)
        integers = set(range(len(results))) - set(traced.floating)
        ctx.mark_non_differentiable(*(results[number] for number in sorted(integers)))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        traced: _Traced = ctx.traced
        saved = ctx.saved_tensors
        given = [grads[number] for number in traced.floating]
        if torch.is_grad_enabled():
            found = traced.gradient()(list(saved[: ctx.width]), given)
        else:
            inputs = [*(saved[place] for place in traced.kept), *given]
            values = tapes.recorder().record(traced.backward, [base.read(one) for one in inputs])
            found = [
                base.fresh(saved[number]._aval, value)
                for number, value in zip(traced.wanted, values, strict=True)
            ]
        result: list[Any] = [None] * ctx.width
        for number, gradient in zip(traced.wanted, found, strict=True):
            result[number] = gradient
        return (None, *result)


def _has_gradients(aval: Aval) -> bool:
    return aval.meta.dtype.is_floating_point or aval.meta.dtype.is_complex


def _gradients(pull: Any, outs: Sequence[Aval], grads: Sequence[jax.Array]) -> list[jax.Array]:
    """Pull gradients back; torch's gradient of a complex number is the conjugate of JAX's."""
    given = iter(grads)
    cotangents = [
        jnp.conj(next(given).astype(out.physical))
        if _has_gradients(out)
        else np.zeros(out.token[0], jax.dtypes.float0)
        for out in outs
    ]
    return [jnp.conj(found) for found in pull(cotangents)]
