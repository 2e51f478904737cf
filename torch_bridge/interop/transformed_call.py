"""JAX functions under the transformations of `torch.func`.

`torch.func` unwraps the tensors of an autograd function level by level, and asks it for its rules:
each of them is JAX's transformation of the function, called as a function of torch tensors again.

>>> import isoshard as iso
>>> cubes = iso.torch_function(lambda x: (x**3).sum())
>>> torch.func.vmap(torch.func.grad(cubes))(torch.tensor([[1.0, 2.0]], device="jax")).tolist()
[[3.0, 12.0]]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from isoshard.torch_bridge._torch_internals.undocumented import is_functorch_wrapped
from isoshard.torch_bridge.common.argument_types import AutogradContext, Leaf
from isoshard.torch_bridge.engine.recording import lazy_tensor

Function = Callable[..., Any]


def is_transformed(leaf: Leaf) -> bool:
    """Whether an argument is a tensor under a transformation of `torch.func`."""
    return (
        isinstance(leaf, torch.Tensor)
        and not isinstance(leaf, lazy_tensor.LazyTensor)
        and is_functorch_wrapped(leaf)
    )


class TransformedCall:
    """A function of arrays that torch calls, with its rules for `torch.func`.

    Args:
        function: takes arrays; returns a pytree.
        name: for messages.
        wrapped: makes a function of torch tensors, by a name.

    Attributes:
        structure: how the results are nested; known once it was called.
    """

    structure: Any

    def __init__(self, function: Function, name: str, wrapped: Callable[[Function, str], Function]):
        """Nothing is traced yet."""
        self.__wrapped__, self._name, self._wrapped = function, name, wrapped
        self._own = wrapped(self._flat, name)
        self._transformed: dict[Any, Any] = {}

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """The results, in their structure."""
        results = _Transformed.apply(self, *tensors)
        return jax.tree.unflatten(self.structure, results)

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The results in a row."""
        return tuple(self._own(*tensors))

    def pullback(self, tensors: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
        """The gradients of the tensors with floats, None of others.

        Args:
            tensors: arguments.
            grads: of the results with floats.
        """
        chosen = _with_floats(tensors)
        given = [*tensors, *grads]
        found = iter(self._by("gradient", (chosen, len(tensors)), _pulled)(*given))
        return [next(found) if number in chosen else None for number in range(len(tensors))]

    def tangents(self, tensors: Sequence[Any], changes: Sequence[Any]) -> list[Any]:
        """The tangents of the results with floats.

        Args:
            tensors: arguments.
            changes: their tangents; None for zeros.
        """
        chosen = _with_floats(tensors)
        given = [
            torch.zeros_like(tensors[number]) if changes[number] is None else changes[number]
            for number in chosen
        ]
        return list(self._by("tangent", (chosen, len(tensors)), _pushed)(*tensors, *given))

    def batched(self, dims: tuple[int | None, ...], size: int) -> TransformedCall:
        """The function of many examples.

        Args:
            dims: for each tensor the axis of the examples, or None.
            size: how many there are.
        """
        key = ("batched", dims, size)
        if key not in self._transformed:
            many = jax.vmap(self._flat, in_axes=dims, axis_size=size)
            self._transformed[key] = TransformedCall(many, self._name, self._wrapped)
        return self._transformed[key]

    def _by(self, what: str, key: Any, rule: Callable[..., Function]) -> Function:
        if (what, key) not in self._transformed:
            function = rule(self._flat, *key)
            self._transformed[what, key] = self._wrapped(function, f"{what} of {self._name}")
        return self._transformed[what, key]

    def _flat(self, *arrays: Any) -> list[Any]:
        results, self.structure = jax.tree.flatten(self.__wrapped__(*arrays))
        return [jnp.asarray(result) for result in results]


def _pulled(flat: Function, chosen: Sequence[int], count: int) -> Function:
    """The VJP: of arguments, and of gradients as torch has them, conjugates of JAX's."""

    def pulled(*given: Any) -> list[Any]:
        arrays, grads = given[:count], given[count:]
        results, pull = jax.vjp(_of_chosen(flat, arrays, chosen), *(arrays[n] for n in chosen))
        cotangents = [
            jnp.conj(grad.astype(result.dtype)) for grad, result in zip(grads, results, strict=True)
        ]
        return [jnp.conj(one) for one in pull(cotangents)]

    return pulled


def _pushed(flat: Function, chosen: Sequence[int], count: int) -> Function:
    def pushed(*given: Any) -> list[Any]:
        arrays, tangents = given[:count], given[count:]
        primals = [arrays[number] for number in chosen]
        return jax.jvp(_of_chosen(flat, arrays, chosen), primals, list(tangents))[1]

    return pushed


def _of_chosen(flat: Function, arrays: Sequence[Any], chosen: Sequence[int]) -> Function:
    """The results with floats, as a function of some arguments."""

    def function(*some: Any) -> list[Any]:
        given = list(arrays)
        for number, array in zip(chosen, some, strict=True):
            given[number] = array
        return [one for one in flat(*given) if np.issubdtype(one.dtype, np.inexact)]

    return function


def _with_floats(tensors: Sequence[Any]) -> tuple[int, ...]:
    return tuple(number for number, one in enumerate(tensors) if _has_floats(one))


def _has_floats(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


class _Transformed(torch.autograd.Function):
    """The function where torch's transformations see it."""

    @staticmethod
    def forward(call: TransformedCall, *tensors: Any) -> tuple[torch.Tensor, ...]:
        return call.run(tensors)

    @staticmethod
    def setup_context(ctx: AutogradContext, inputs: Any, output: Any) -> None:
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.with_floats = _with_floats(output)
        ctx.mark_non_differentiable(*(one for one in output if not _has_floats(one)))

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Any) -> Any:
        given = [grads[number] for number in ctx.with_floats]
        return (None, *ctx.call.pullback(ctx.saved_tensors, given))

    @staticmethod
    def jvp(ctx: AutogradContext, _: Any, *changes: Any) -> Any:
        found = dict(
            zip(ctx.with_floats, ctx.call.tangents(ctx.saved_tensors, changes), strict=True)
        )
        return tuple(found.get(number) for number in range(ctx.call.structure.num_leaves))

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: TransformedCall, *tensors: Any) -> Any:
        batched = call.batched(tuple(in_dims[1:]), info.batch_size)
        results = _Transformed.apply(batched, *tensors)
        return results, tuple(0 for _ in results)
