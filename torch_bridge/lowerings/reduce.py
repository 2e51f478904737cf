"""Reductions and scans along axes.

>>> from isoshard.torch_bridge.lowerings import registry
>>> registry.find(torch.ops.aten.var.correction).function(jnp.array([1.0, 2.0, 6.0]), correction=1)
Array(7., dtype=float32)

16-bit floats are summed in float32, as torch does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from isoshard.core.extensions import scan_where_split
from isoshard.core.nn.precision import averaged

from .argument_forms import (
    at_least_1d,
    axes,
    axis,
    cast,
    first_index,
    floating,
    lengths,
    wide,
    wide_dtype,
)
from .block_operators import by_shards
from .extremes import largest, smallest
from .log_sum import running
from .registry import lower
from .unsharded_axes import diagonal, unsharded


@lower("aten::sum", "aten::sum.dim_IntList")
def sum_(
    x: jax.Array,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: np.dtype | None = None,
) -> jax.Array:
    """Sum; of integers and bools, in the widest integer."""
    return _in(dtype, jnp.sum, x, axes(dim, x.ndim), keepdims=keepdim)


def _in(
    dtype: np.dtype | None,
    reduced: Callable[..., jax.Array],
    x: jax.Array,
    *args: Any,
    **kwargs: Any,
) -> jax.Array:
    """`reduced` of `x` in a dtype (None: its own, or torch's for it); halves are added as floats.

    JAX adds and multiplies them so where no dtype is named, and in 16 bits where one is.
    """
    if dtype is None:
        return reduced(x, *args, **kwargs)
    return reduced(wide(cast(x, dtype)), *args, **kwargs, dtype=wide_dtype(dtype)).astype(dtype)


def _as(x: jax.Array, dtype: np.dtype | None) -> jax.Array:
    """What a mean in another dtype begins with."""
    return x if dtype is None else cast(x, dtype)


def _nansum_shape(
    x: torch.Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """torch's `meta` kernel takes `[]` for no axes; the others take it for all."""
    return torch.ops.aten.nansum.default(x, dim or None, keepdim, dtype=dtype)


@lower("aten::nansum", meta=_nansum_shape)
def nansum(
    x: jax.Array,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: np.dtype | None = None,
) -> jax.Array:
    """Sum with NaN counted as 0."""
    return sum_(jnp.where(jnp.isnan(x), jnp.zeros_like(x), x), dim, keepdim, dtype=dtype)


@lower("aten::mean", "aten::mean.dim")
def mean(
    x: jax.Array,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: np.dtype | None = None,
) -> jax.Array:
    """Mean, of no element NaN."""
    return averaged(_as(x, dtype), axes(dim, x.ndim), keepdims=keepdim)


@lower("aten::prod", "aten::prod.dim_int")
def prod(
    x: jax.Array, dim: int | None = None, keepdim: bool = False, *, dtype: np.dtype | None = None
) -> jax.Array:
    """Product; of integers and bools, in the widest integer."""
    return _in(dtype, jnp.prod, x, axes(dim, x.ndim), keepdims=keepdim)


@lower("aten::var_mean.correction")
def var_mean(
    x: jax.Array,
    dim: int | Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
):
    """Variance with divisor `n - correction` (1 by default), and the mean."""
    along = axes(dim, x.ndim)
    x = wide(x)
    center = averaged(x, along, keepdims=True)
    count = max(0, lengths(x.shape, along) - (1 if correction is None else correction))
    off = x - center
    components = (off.real, off.imag) if jnp.iscomplexobj(x) else (off,)
    variance = sum(jnp.sum(jnp.square(p), along, keepdims=keepdim) / count for p in components)
    return variance, center if keepdim else jnp.squeeze(center, along)


@lower("aten::std_mean.correction")
def std_mean(
    x: jax.Array,
    dim: int | Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Standard deviation and mean."""
    variance, center = var_mean(x, dim, correction=correction, keepdim=keepdim)
    return jnp.sqrt(variance), center


@lower("aten::var.correction")
def var(
    x: jax.Array,
    dim: int | Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
):
    """Variance with divisor `n - correction`."""
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


@lower("aten::std.correction")
def std(
    x: jax.Array,
    dim: int | Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> jax.Array:
    """Standard deviation with divisor `n - correction`."""
    return jnp.sqrt(var(x, dim, correction=correction, keepdim=keepdim))


@lower("aten::amax", "aten::max")
def amax(x: jax.Array, dim: int | Sequence[int] | None = (), keepdim: bool = False) -> jax.Array:
    """Largest element, NaN if there is one."""
    return largest(x, axes(dim, x.ndim), keepdims=keepdim)


@lower("aten::amin", "aten::min")
def amin(x: jax.Array, dim: int | Sequence[int] | None = (), keepdim: bool = False) -> jax.Array:
    """Smallest element, NaN if there is one."""
    return smallest(x, axes(dim, x.ndim), keepdims=keepdim)


@lower("aten::aminmax")
def aminmax(
    x: jax.Array, *, dim: int | None = None, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Smallest and largest element."""
    return amin(x, dim, keepdim), amax(x, dim, keepdim)


@lower("aten::argmax")
def argmax(x: jax.Array, dim: int | None = None, keepdim: bool = False) -> jax.Array:
    """Place of the first largest element, or of the first NaN."""
    return _arg_reduce(jax.lax.argmax, x, dim, keepdim)


@lower("aten::argmin")
def argmin(x: jax.Array, dim: int | None = None, keepdim: bool = False) -> jax.Array:
    """Place of the first smallest element, or of the first NaN."""
    return _arg_reduce(jax.lax.argmin, x, dim, keepdim)


@lower("aten::max.dim")
def max_dim(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """Largest element along an axis, and its index."""
    return amax(x, dim, keepdim), argmax(x, dim, keepdim)


@lower("aten::min.dim")
def min_dim(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """Smallest element along an axis, and its index."""
    return amin(x, dim, keepdim), argmin(x, dim, keepdim)


def _arg_reduce(
    function: Callable[..., jax.Array], x: jax.Array, dim: int | None, keepdim: bool
) -> jax.Array:
    if x.ndim == 0:
        return jnp.zeros((), jnp.int32)
    if dim is not None:
        return first_index(function, x, dim, keepdims=keepdim)
    index = first_index(function, x.reshape(-1), 0)
    return index.reshape((1,) * x.ndim) if keepdim else index


def _truth_shape(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Along no axis torch's `meta` kernels keep the order in memory; the others do not."""

    def shape(
        x: torch.Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False
    ) -> torch.Tensor:
        result = op(x, dim, keepdim)
        return (
            torch.empty(x.shape, dtype=result.dtype, device="meta") if dim in ((), []) else result
        )

    return shape


@lower("aten::all.dims", meta=_truth_shape(torch.ops.aten.all.dims))
@lower("aten::all", "aten::all.dim")
def all_(x: jax.Array, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> jax.Array:
    """Whether every element is not 0; along no axis (`[]`), each for itself."""
    return jnp.all(x != 0, _axes_or_none(dim, x.ndim), keepdims=keepdim)


@lower("aten::any.dims", meta=_truth_shape(torch.ops.aten.any.dims))
@lower("aten::any", "aten::any.dim")
def any_(x: jax.Array, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> jax.Array:
    """Whether any element is not 0; along no axis (`[]`), each for itself."""
    return jnp.any(x != 0, _axes_or_none(dim, x.ndim), keepdims=keepdim)


@lower("aten::_is_all_true")
def is_all_true(x: jax.Array) -> jax.Array:
    """Whether every element of a bool array is True."""
    return jnp.all(x)


@lower("aten::_is_any_true")
def is_any_true(x: jax.Array) -> jax.Array:
    """Whether any element of a bool array is True."""
    return jnp.any(x)


def _axes_or_none(dim: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    return () if dim in ((), []) else axes(dim, ndim)


@lower("aten::count_nonzero", "aten::count_nonzero.dim_IntList")
def count_nonzero(x: jax.Array, dim: int | Sequence[int] | None = None) -> jax.Array:
    """How many elements are not 0."""
    return jnp.sum(x != 0, axes(dim, x.ndim))


@lower("aten::logsumexp")
def logsumexp(x: jax.Array, dim: int | Sequence[int], keepdim: bool = False) -> jax.Array:
    """`log(sum(exp(x)))` without overflow."""
    return jax.nn.logsumexp(floating(wide(x)), axes(dim, x.ndim), keepdims=keepdim)


@lower("aten::linalg_vector_norm")
def vector_norm(
    x: jax.Array,
    ord: float = 2,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: np.dtype | None = None,
) -> jax.Array:
    """The p-norm of the elements along `dim`, with p = `ord`, in particular 0 and infinity."""
    along = axes(dim, x.ndim)
    size = wide(jnp.abs(x if dtype is None else x.astype(dtype)))
    if ord == float("inf"):
        return largest(size, along, keepdims=keepdim, initial=0)
    if ord == float("-inf"):
        return smallest(size, along, keepdims=keepdim, initial=jnp.inf)
    if ord == 0:
        return jnp.sum(size != 0, along, keepdims=keepdim).astype(size.dtype)
    if ord == 1:
        return jnp.sum(size, along, keepdims=keepdim)
    if ord == 2:
        return jnp.sqrt(jnp.sum(jnp.square(size), along, keepdims=keepdim))
    return jnp.sum(size**ord, along, keepdims=keepdim) ** (1 / ord)


@lower("aten::norm.Scalar")
def norm(x: jax.Array, p: float = 2) -> jax.Array:
    """The p-norm of all elements."""
    return vector_norm(x, p)


@lower("aten::norm.ScalarOpt_dim", "aten::norm.ScalarOpt_dim_dtype", "aten::norm.ScalarOpt_dtype")
def norm_dim(
    x: jax.Array,
    p: float | None = None,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: np.dtype | None = None,
) -> jax.Array:
    """The p-norm along axes, with p = 2 for None."""
    return vector_norm(x, 2 if p is None else p, dim, keepdim, dtype=dtype)


@lower("aten::trace")
def trace(x: jax.Array) -> jax.Array:
    """Sum of the diagonal."""
    return jnp.sum(diagonal(x, 0, 0, 1))


@lower("aten::cumsum")
def cumsum(x: jax.Array, dim: int, *, dtype: np.dtype | None = None) -> jax.Array:
    """Running sum; of integers and bools, in the widest integer."""
    return _scan(functools.partial(_where_split, "cumsum", jnp.cumsum), x, dim, dtype)


@lower("aten::cumprod")
def cumprod(x: jax.Array, dim: int, *, dtype: np.dtype | None = None) -> jax.Array:
    """Running product; of integers and bools, in the widest integer."""
    return _scan(functools.partial(_where_split, "cumprod", jnp.cumprod), x, dim, dtype)


def _where_split(
    verb: str, function: Callable[[jax.Array, int], jax.Array], line: jax.Array, along: int
) -> jax.Array:
    """Devices give each other totals, and no rows, where the axis may be split."""
    if by_shards(line):
        return scan_where_split(verb, along, line)
    return function(unsharded(line, [along]), along)


def _scan(
    function: Callable[[jax.Array, int], jax.Array], x: jax.Array, dim: int, dtype: np.dtype | None
) -> jax.Array:
    if dtype is None and not jnp.issubdtype(x.dtype, jnp.inexact):
        dtype = jax.dtypes.canonicalize_dtype(np.int64)  # as torch promises, unless in place
    line = at_least_1d(wide(x if dtype is None else cast(x, dtype)))
    along = axis(dim, line.ndim)
    return function(line, along).reshape(x.shape)


@lower("aten::logcumsumexp")
def logcumsumexp(x: jax.Array, dim: int) -> jax.Array:
    """Running `log(sum(exp(x)))`."""
    return _scan(
        lambda line, along: running(unsharded(line, [along]), along), floating(x), dim, None
    )


@lower("aten::hash_tensor")
def hash_tensor(
    x: jax.Array, dim: int | Sequence[int] = (), *, keepdim: bool = False, mode: int = 0
) -> jax.Array:
    """The exclusive or of the bits of all elements, floats as float64: a `uint64`."""
    kind = jnp.float64 if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.int64
    bits = jax.lax.bitcast_convert_type(x.astype(kind), jnp.uint64)
    along = axes(dim, x.ndim)
    bits = unsharded(bits, along)  # XLA's CPU devices cannot combine what each of them finds
    hashed = jax.lax.reduce(bits, np.uint64(0), jax.lax.bitwise_xor, along)
    return jnp.expand_dims(hashed, along) if keepdim else hashed
