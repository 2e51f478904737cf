"""JAX functions under the transformations of `torch.func`.

`torch.func` unwraps the tensors of an autograd function level by level, and calls its rules: each
of them is JAX's transformation of the function, called as a function of torch tensors again.

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
        wrapped: converts a function and its name to a function of torch tensors.

    Attributes:
        structure: how the results are nested; known once it was called.
    """

    structure: Any

    def __init__(self, function: Function, name: str, wrapped: Callable[[Function, str], Function]):
        """Nothing is traced yet."""
        self.__wrapped__, self._name, self._wrapped = function, name, wrapped
        self._call = wrapped(self._flat, name)
        self._transformed: dict[Any, Any] = {}

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """The results, in their structure."""
        results = _Transformed.apply(self, *tensors)
        return jax.tree.unflatten(self.structure, results)

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The flat results."""
        return tuple(self._call(*tensors))

    def vjp(self, tensors: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
        """The gradients of the tensors with floats, None of others."""
        chosen = _with_floats(tensors)
        operands = [*tensors, *grads]
        gradients_left = iter(self._by("gradient", (chosen, len(tensors)), _vjp_of)(*operands))
        return [next(gradients_left) if index in chosen else None for index in range(len(tensors))]

    def jvp(self, tensors: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """The tangents of the results with floats.

        Args:
            tensors: arguments.
            tangents: of the tensors; None for zeros.
        """
        chosen = _with_floats(tensors)
        chosen_tangents = [
            torch.zeros_like(tensors[index]) if tangents[index] is None else tangents[index]
            for index in chosen
        ]
        return list(
            self._by("tangent", (chosen, len(tensors)), _jvp_of)(*tensors, *chosen_tangents)
        )

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

    def _by(self, kind: str, key: Any, rule: Callable[..., Function]) -> Function:
        if (kind, key) not in self._transformed:
            function = rule(self._flat, *key)
            self._transformed[kind, key] = self._wrapped(function, f"{kind} of {self._name}")
        return self._transformed[kind, key]

    def _flat(self, *arrays: Any) -> list[Any]:
        results, self.structure = jax.tree.flatten(self.__wrapped__(*arrays))
        return [jnp.asarray(result) for result in results]


def _vjp_of(flat: Function, chosen: Sequence[int], count: int) -> Function:
    """The VJP: of arguments, and of gradients as torch has them, conjugates of JAX's."""

    def vjp(*operands: Any) -> list[Any]:
        arrays, grads = operands[:count], operands[count:]
        results, pull = jax.vjp(_of_chosen(flat, arrays, chosen), *(arrays[n] for n in chosen))
        cotangents = [
            jnp.conj(grad.astype(result.dtype)) for grad, result in zip(grads, results, strict=True)
        ]
        return [jnp.conj(gradient) for gradient in pull(cotangents)]

    return vjp


def _jvp_of(flat: Function, chosen: Sequence[int], count: int) -> Function:
    def jvp(*operands: Any) -> list[Any]:
        arrays, tangents = operands[:count], operands[count:]
        primals = [arrays[index] for index in chosen]
        return jax.jvp(_of_chosen(flat, arrays, chosen), primals, list(tangents))[1]

    return jvp


def _of_chosen(flat: Function, arrays: Sequence[Any], chosen: Sequence[int]) -> Function:
    """The results with floats, as a function of some arguments."""

    def function(*some: Any) -> list[Any]:
        operands = list(arrays)
        for index, array in zip(chosen, some, strict=True):
            operands[index] = array
        return [result for result in flat(*operands) if np.issubdtype(result.dtype, np.inexact)]

    return function


def _with_floats(tensors: Sequence[Any]) -> tuple[int, ...]:
    return tuple(index for index, tensor in enumerate(tensors) if _has_floats(tensor))


def _has_floats(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


class _Transformed(torch.autograd.Function):
    """The function as torch's transformations see it."""

    @staticmethod
    def forward(call: TransformedCall, *tensors: Any) -> tuple[torch.Tensor, ...]:
        return call.run(tensors)

    @staticmethod
    def setup_context(ctx: AutogradContext, inputs: Any, output: Any) -> None:
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.with_floats = _with_floats(output)
        ctx.mark_non_differentiable(*(result for result in output if not _has_floats(result)))

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Any) -> Any:
        cotangents = [grads[index] for index in ctx.with_floats]
        return (None, *ctx.call.vjp(ctx.saved_tensors, cotangents))

    @staticmethod
    def jvp(ctx: AutogradContext, _: Any, *tangents: Any) -> Any:
        by_index = dict(
            zip(ctx.with_floats, ctx.call.jvp(ctx.saved_tensors, tangents), strict=True)
        )
        return tuple(by_index.get(index) for index in range(ctx.call.structure.num_leaves))

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: TransformedCall, *tensors: Any) -> Any:
        batched = call.batched(tuple(in_dims[1:]), info.batch_size)
        results = _Transformed.apply(batched, *tensors)
        return results, tuple(0 for _ in results)
