"""Linear layers without a reshape: one product over the last axis, for any rank.

`torch.nn.Linear` reshapes its input to a matrix: batch and sequence become one axis, forward and
backward, and where both are split the partitioner must propagate both through the reshape. Here
they remain two axes.

>>> import isoshard.torch_bridge as xs
>>> mesh = xs.Mesh(range(8), (2, 4), ("data", "sequence"))
>>> layer = EinsumLinear(16, 16).to("jax")
>>> x = xs.mark_sharding(torch.ones(2, 4, 16).to("jax"), mesh, ("data", "sequence", None))
>>> y = layer(x)
>>> xs.sync()
>>> y.sharding_spec
'{devices=[2,4,1]0,1,2,3,4,5,6,7}'
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from isoshard.core.runtime.caches import cached
from isoshard.torch_bridge._torch_internals.undocumented import (
    get_autocast_dtype,
    is_autocast_enabled,
)
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.common.argument_types import AutogradContext, DeviceTensor
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.recording.tape import Recipe
from isoshard.torch_bridge.engine.values.value import Aval
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

from .manual_tensor import ManualTensor


class XLAPatchedLinear(torch.autograd.Function):
    """`apply(input, weight, bias)`: `torch.nn.functional.linear` without a reshape.

    In an autocast region the product is computed in the region's dtype. Double backward raises.
    """

    @staticmethod
    def forward(
        ctx: AutogradContext, input: DeviceTensor, weight: DeviceTensor, bias: DeviceTensor = None
    ) -> torch.Tensor:
        """`input @ weight.T + bias`: (.., n), (m, n), (m) to (.., m)."""
        _check(input, weight, bias)
        ctx.has_bias = bias is not None
        ctx.save_for_backward(input, weight)
        dtype = get_autocast_dtype("jax") if is_autocast_enabled("jax") else input.dtype
        tensors = [input, weight] if bias is None else [input, weight, bias]
        aval = Aval.contiguous((*input.shape[:-1], weight.shape[0]), dtype)
        recipe = _forward(str(aval.physical), len(tensors))
        (value,) = tapes.recorder().record(recipe, [lazy_tensor.read(tensor) for tensor in tensors])
        return lazy_tensor.fresh(aval, value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: AutogradContext, *grad_output: Any) -> Any:
        """The gradients of input, weight and bias, in their dtypes."""
        input, weight = ctx.saved_tensors
        operands = [lazy_tensor.read(tensor) for tensor in (grad_output[0], input, weight)]
        avals = [Aval.contiguous(tuple(t.shape), t.dtype) for t in (input, weight)]
        avals.append(Aval.contiguous((weight.shape[0],), weight.dtype))
        gradients: list[Any] = [None, None, None]
        for index in range(3):
            if ctx.needs_input_grad[index] and (index < 2 or ctx.has_bias):
                (value,) = tapes.recorder().record(_BACKWARD[index], operands)
                gradients[index] = lazy_tensor.fresh(avals[index], value)
        return tuple(gradients)


def xla_patched_nn_linear_forward(m: torch.nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """A linear layer applied to its input without a reshape to a matrix.

    Args:
        m: the layer.
        input: (.., m.in_features), any rank; on another device, and in a manual region, this is
            `F.linear`.

    Returns:
        (.., m.out_features).
    """
    if not isinstance(input, XLAShardedTensor) or isinstance(input, ManualTensor):
        return torch.nn.functional.linear(input, m.weight, m.bias)
    result: Any = XLAPatchedLinear.apply(input, m.weight, m.bias)
    return result


class EinsumLinear(torch.nn.Linear):
    """A `torch.nn.Linear` that does not reshape its input; see the module's description.

    Args:
        *args: as for `torch.nn.Linear`.
        **kwargs: likewise.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        """See the class."""
        super().__init__(*args, **kwargs)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The layer applied to (.., in_features)."""
        return xla_patched_nn_linear_forward(self, input)


def apply_xla_patch_to_nn_linear(module: torch.nn.Module) -> torch.nn.Module:
    """Make every `torch.nn.Linear` inside a module an `EinsumLinear`.

    The layers remain the same objects, with their parameters, hooks and names, so optimizers made
    before remain valid, and tied weights remain tied. Subclasses of `Linear` are not changed, as
    they may compute something else.

    Args:
        module: changed in place; itself it is not patched.

    Returns:
        `module`.
    """
    for child in module.modules():
        if type(child) is torch.nn.Linear and child is not module:
            child.__class__ = EinsumLinear
    return module


def _check(input: Any, weight: Any, bias: Any) -> None:
    for name, tensor in (("input", input), ("weight", weight), ("bias", bias)):
        if tensor is not None and not isinstance(tensor, XLAShardedTensor):
            raise RuntimeError(
                f"XLAPatchedLinear takes tensors on the {naming.current().type} device, and "
                f"{name} is on "
                f"{tensor.device}; use torch.nn.functional.linear there"
            )
    wrong = []
    if not is_autocast_enabled("jax") and input.dtype != weight.dtype:
        wrong.append(f"the dtypes {input.dtype} and {weight.dtype} differ")
    if input.dim() < 1 or weight.dim() != 2 or input.shape[-1] != weight.shape[1]:
        wrong.append(
            f"an input of shape {tuple(input.shape)} and a weight of shape {tuple(weight.shape)} "
            "have no product (.., n) by (m, n)"
        )
    if bias is not None and tuple(bias.shape) != tuple(weight.shape[:1]):
        wrong.append(f"a bias of shape {tuple(bias.shape)} does not fit {tuple(weight.shape)}")
    if wrong:
        raise RuntimeError(f"linear: {'; '.join(wrong)}")


def _last_axes(x: jax.Array, y: jax.Array) -> jax.Array:
    """(.., n) by (m, n) to (.., m)."""
    return jax.lax.dot_general(
        x, y, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=_wide(x)
    )


def _wide(x: jax.Array) -> Any:
    """The dtype of sums: float32 for 16-bit floats."""
    return jnp.promote_types(x.dtype, "float32") if jnp.issubdtype(x.dtype, jnp.floating) else None


@cached(1024)
def _forward(dtype: str, count: int) -> Recipe:
    def run(arrays: Any, _scalars: Any, _key: Any) -> list[jax.Array]:
        x, weight, *bias = (array.astype(dtype) for array in arrays)
        y = _last_axes(x, weight)
        return [(y + bias[0] if bias else y).astype(dtype)]

    return Recipe("linear", run, count=1, detail=count)


def _input_gradient(arrays: Any, _scalars: Any, _key: Any) -> list[jax.Array]:
    g, x, weight = arrays
    return [_last_axes(g, weight.T.astype(g.dtype)).astype(x.dtype)]


def _weight_gradient(arrays: Any, _scalars: Any, _key: Any) -> list[jax.Array]:
    g, x, weight = arrays
    batch = tuple(range(g.ndim - 1))
    product = jax.lax.dot_general(
        g, x.astype(g.dtype), ((batch, batch), ((), ())), preferred_element_type=_wide(g)
    )
    return [product.astype(weight.dtype)]


def _bias_gradient(arrays: Any, _scalars: Any, _key: Any) -> list[jax.Array]:
    g, _, weight = arrays
    return [jnp.sum(g, axis=tuple(range(g.ndim - 1)), dtype=_wide(g)).astype(weight.dtype)]


_BACKWARD = (
    Recipe("linear_backward_input", _input_gradient, 1),
    Recipe("linear_backward_weight", _weight_gradient, 1),
    Recipe("linear_backward_bias", _bias_gradient, 1),
)
