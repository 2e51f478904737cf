"""Products of matrices: MatMul, Gemm, Einsum."""

from __future__ import annotations

import jax.numpy as jnp

from .registry import operator


@operator("MatMul")
def matmul(a, b):
    """The product of (stacks of) matrices, as NumPy has it."""
    return jnp.matmul(a, b)


@operator("Gemm", since=7)
def gemm(a, b, c=None, *, alpha=1.0, beta=1.0, transA=0, transB=0):
    """alpha * A B + beta * C, each matrix transposed on request, C broadcast."""
    product = jnp.matmul(a.T if transA else a, b.T if transB else b)
    if alpha != 1.0:
        product = (product * alpha).astype(a.dtype)
    if c is None or beta == 0.0:
        return product
    return product + (c if beta == 1.0 else (c * beta).astype(c.dtype))


@operator("Einsum", since=12)
def einsum(*inputs, equation):
    """Einstein's sum."""
    return jnp.einsum(equation, *inputs)
