"""Grouped matrix products: one matrix per group of rows, as mixtures of experts use them.

`offs` are the ends of the groups along the ragged axis. Rows behind the last end belong to no
group; torch leaves them undefined, here they are zero.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .registry import lower


def grouped_shape(
    self: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The result's shape: torch's own `meta` kernel takes bfloat16 only."""
    if offs is None:
        size = (self.shape[0], self.shape[1], mat2.shape[-1])
    elif self.dim() == 2 and mat2.dim() == 2:
        size = (offs.shape[0], self.shape[0], mat2.shape[1])
    else:
        size = (self.shape[-2], mat2.shape[-1])
    return self.new_empty(size, dtype=out_dtype or self.dtype)


@lower("aten::_grouped_mm", meta=grouped_shape)
def grouped_mm(
    self: jax.Array,
    mat2: jax.Array,
    offs: jax.Array | None = None,
    bias: jax.Array | None = None,
    out_dtype: np.dtype | None = None,
) -> jax.Array:
    """A product for each group of rows; see the module's description."""
    if bias is not None:
        raise NotImplementedError(
            "aten::_grouped_mm with a bias has no lowering; add the bias of each row afterwards"
        )
    if offs is None:  # a batch of products
        return self @ mat2
    ends = offs.astype(jnp.int32)
    sizes = jnp.diff(ends, prepend=jnp.zeros(1, ends.dtype))
    if self.ndim == 2 and mat2.ndim == 3:
        return jax.lax.ragged_dot(self, mat2, sizes)
    if self.ndim == 3:  # the columns of `mat2` are grouped
        return jax.lax.ragged_dot(mat2.T, self.swapaxes(1, 2), sizes).T
    dimensions = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (0,)), ((), ())),
        lhs_ragged_dimensions=[1],
        rhs_group_dimensions=[],
    )
    return jax.lax.ragged_dot_general(self, mat2, sizes, dimensions)


# What transformers takes for experts while `torch.compiler.is_compiling()`, instead of torch's.
@lower("transformers::grouped_mm_fallback")
def _grouped_mm_fallback(input: jax.Array, weight: jax.Array, offs: jax.Array) -> jax.Array:
    return grouped_mm(input, weight, offs)


@lower("transformers::grouped_mm_fallback_backward")
def _grouped_mm_fallback_backward(
    input: jax.Array, weight: jax.Array, offs: jax.Array, grad_output: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return (
        grouped_mm(grad_output, weight.swapaxes(1, 2), offs),
        grouped_mm(input.T, grad_output, offs),
    )
