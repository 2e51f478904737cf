"""torch_xla's kernels by name; what computes them is plain JAX, on every kind of device.

Arguments that tune the TPU kernels (tiles, blocks, memory) are taken and do nothing. A Pallas
kernel of one's own is called with `make_kernel_from_pallas`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from isoshard.torch_bridge.kit import MASKED as DEFAULT_MASK_VALUE
from isoshard.torch_bridge.kit import (
    XLA_LIB,
    FlashAttention,
    flash_attention,
    gmm,
    gmm_backward,
    jax_dtype,
    multi_queries_paged_attention,
    paged_attention,
    physical_dtype,
    quantized_matmul_int8,
    ragged_paged_attention,
    repeat_with_fixed_output_size,
    tgmm,
    torch_function,
)

__all__ = [
    "DEFAULT_MASK_VALUE",
    "XLA_LIB",
    "FlashAttention",
    "convert_torch_dtype_to_jax",
    "flash_attention",
    "gmm",
    "gmm_backward",
    "jax_import_guard",
    "make_kernel_from_pallas",
    "multi_queries_paged_attention",
    "paged_attention",
    "quantized_matmul_int8",
    "ragged_paged_attention",
    "repeat_with_fixed_output_size",
    "tgmm",
    "to_jax_shape_dtype_struct",
    "trace_pallas",
]


def jax_import_guard() -> None:
    """Nothing: JAX holds the devices anyway."""


def make_kernel_from_pallas(
    kernel: Callable[..., Any], output_shape_dtype_fn: Callable[..., Any]
) -> Callable[..., Any]:
    """Make a Pallas kernel callable on tensors.

    Args:
        kernel: a JAX function that calls `pallas_call`.
        output_shape_dtype_fn: takes the tensors; a list of `(shape, dtype)`, which the results must
            have.

    Returns:
        `f(*tensors, static_argnums=.., static_argnames=.., **options)`. What is no tensor is
        static.
    """
    name = getattr(kernel, "__name__", "kernel")
    call = torch_function(kernel, name=name)

    def wrapped(
        *args: Any, static_argnums: Any = None, static_argnames: Any = None, **kwargs: Any
    ) -> Any:
        results = call(*args, **kwargs)
        leaves: Sequence[Any] = results if isinstance(results, tuple | list) else (results,)
        got = [(tuple(leaf.shape), leaf.dtype) for leaf in leaves]
        expected = [(tuple(shape), dtype) for shape, dtype in output_shape_dtype_fn(*args)]
        if got != expected:
            raise ValueError(f"{name} returned {got}, and its output_shape_dtype_fn {expected}")
        return leaves[0] if len(leaves) == 1 else tuple(leaves)

    return wrapped


def convert_torch_dtype_to_jax(dtype: torch.dtype) -> Any:
    """The dtype in which JAX holds tensors of a torch dtype."""
    return jax_dtype(physical_dtype(dtype))


def to_jax_shape_dtype_struct(tensor: torch.Tensor) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a tensor in JAX's terms."""
    return jax.ShapeDtypeStruct(tuple(tensor.shape), jax_dtype(physical_dtype(tensor.dtype)))


def trace_pallas(*args: Any, **kwargs: Any) -> Any:
    """Refused: it gives the payload of a TPU custom call, for which there is no use here.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "trace_pallas makes the payload of a TPU custom call; here a Pallas kernel is called as it "
        "is: make_kernel_from_pallas(kernel, output_shape_dtype_fn), or call_jax(kernel, args)"
    )
