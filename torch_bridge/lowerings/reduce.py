"""Reductions and scans along axes.

>>> from isoshard.torch_bridge.lowerings import registry
>>> registry.find(torch.ops.aten.var.correction).function(jnp.array([1.0, 2.0, 6.0]), correction=1)
Array(7., dtype=float32)

16-bit floats are summed in float32, as torch does.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch

from isoshard.core.domain.scan import run_where_split

from .arguments import (
    at_least_1d,
    axes,
    axis,
    cast,
    first_place,
    floating,
    lengths,
    wide,
    wide_dtype,
)
from .extremes import largest, smallest
from .log_sum import running
from .numerics import averaged
from .registry import lower
from .spatial import by_shards
from .whole import diagonal, whole


@lower("aten::sum", "aten::sum.dim_IntList")
def sum_(x, dim=None, keepdim=False, *, dtype=None):
    """Sum; of integers and bools, in the widest integer."""
    return _in(dtype, jnp.sum, x, axes(dim, x.ndim), keepdims=keepdim)


def _in(dtype, reduced, x, *args, **kwargs):
    """`reduced` of `x` in a dtype (None: its own, or torch's for it); halves are added as floats.

    JAX adds and multiplies them so where no dtype is named, and in 16 bits where one is.
    """
    if dtype is None:
        return reduced(x, *args, **kwargs)
    return reduced(wide(cast(x, dtype)), *args, **kwargs, dtype=wide_dtype(dtype)).astype(dtype)


def _as(x, dtype):
    """What a mean in another dtype begins with."""
    return x if dtype is None else cast(x, dtype)


def _nansum_shape(x, dim=None, keepdim=False, *, dtype=None):
    """torch's `meta` kernel takes `[]` for no axes; the others take it for all."""
    return torch.ops.aten.nansum.default(x, dim or None, keepdim, dtype=dtype)


@lower("aten::nansum", meta=_nansum_shape)
def nansum(x, dim=None, keepdim=False, *, dtype=None):
    """Sum with NaN counted as 0."""
    return sum_(jnp.where(jnp.isnan(x), jnp.zeros_like(x), x), dim, keepdim, dtype=dtype)


@lower("aten::mean", "aten::mean.dim")
def mean(x, dim=None, keepdim=False, *, dtype=None):
    """Mean, of no element NaN."""
    return averaged(_as(x, dtype), axes(dim, x.ndim), keepdims=keepdim)


@lower("aten::prod", "aten::prod.dim_int")
def prod(x, dim=None, keepdim=False, *, dtype=None):
    """Product; of integers and bools, in the widest integer."""
    return _in(dtype, jnp.prod, x, axes(dim, x.ndim), keepdims=keepdim)


@lower("aten::var_mean.correction")
def var_mean(x, dim=None, *, correction=None, keepdim=False):
    """Variance with divisor `n - correction` (1 unless given), and the mean."""
    along = axes(dim, x.ndim)
    x = wide(x)
    center = averaged(x, along, keepdims=True)
    count = max(0, lengths(x.shape, along) - (1 if correction is None else correction))
    off = x - center
    parts = (off.real, off.imag) if jnp.iscomplexobj(x) else (off,)
    variance = sum(jnp.sum(jnp.square(p), along, keepdims=keepdim) / count for p in parts)
    return variance, center if keepdim else jnp.squeeze(center, along)


@lower("aten::std_mean.correction")
def std_mean(x, dim=None, *, correction=None, keepdim=False):
    """Standard deviation and mean."""
    variance, center = var_mean(x, dim, correction=correction, keepdim=keepdim)
    return jnp.sqrt(variance), center


@lower("aten::var.correction")
def var(x, dim=None, *, correction=None, keepdim=False):
    """Variance with divisor `n - correction`."""
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


@lower("aten::std.correction")
def std(x, dim=None, *, correction=None, keepdim=False):
    """Standard deviation with divisor `n - correction`."""
    return jnp.sqrt(var(x, dim, correction=correction, keepdim=keepdim))


@lower("aten::amax", "aten::max")
def amax(x, dim=(), keepdim=False):
    """Largest element, NaN if there is one."""
    return largest(x, axes(dim, x.ndim), keepdims=keepdim)


@lower("aten::amin", "aten::min")
def amin(x, dim=(), keepdim=False):
    """Smallest element, NaN if there is one."""
    return smallest(x, axes(dim, x.ndim), keepdims=keepdim)


@lower("aten::aminmax")
def aminmax(x, *, dim=None, keepdim=False):
    """Smallest and largest element."""
    return amin(x, dim, keepdim), amax(x, dim, keepdim)


@lower("aten::argmax")
def argmax(x, dim=None, keepdim=False):
    """Place of the first largest element, or of the first NaN."""
    return _place(jax.lax.argmax, x, dim, keepdim)


@lower("aten::argmin")
def argmin(x, dim=None, keepdim=False):
    """Place of the first smallest element, or of the first NaN."""
    return _place(jax.lax.argmin, x, dim, keepdim)


@lower("aten::max.dim")
def max_dim(x, dim, keepdim=False):
    """Largest element along an axis, and its place."""
    return amax(x, dim, keepdim), argmax(x, dim, keepdim)


@lower("aten::min.dim")
def min_dim(x, dim, keepdim=False):
    """Smallest element along an axis, and its place."""
    return amin(x, dim, keepdim), argmin(x, dim, keepdim)


def _place(function, x, dim, keepdim):
    if x.ndim == 0:
        return jnp.zeros((), jnp.int32)
    if dim is not None:
        return first_place(function, x, dim, keepdims=keepdim)
    found = first_place(function, x.reshape(-1), 0)
    return found.reshape((1,) * x.ndim) if keepdim else found


def _truth_shape(op):
    """Along no axis torch's `meta` kernels keep the order in memory; the others do not."""

    def shape(x, dim=None, keepdim=False):
        made = op(x, dim, keepdim)
        return torch.empty(x.shape, dtype=made.dtype, device="meta") if dim in ((), []) else made

    return shape


@lower("aten::all.dims", meta=_truth_shape(torch.ops.aten.all.dims))
@lower("aten::all", "aten::all.dim")
def all_(x, dim=None, keepdim=False):
    """Whether every element is not 0; along no axis (`[]`), each for itself."""
    return jnp.all(x != 0, _axes_or_none(dim, x.ndim), keepdims=keepdim)


@lower("aten::any.dims", meta=_truth_shape(torch.ops.aten.any.dims))
@lower("aten::any", "aten::any.dim")
def any_(x, dim=None, keepdim=False):
    """Whether any element is not 0; along no axis (`[]`), each for itself."""
    return jnp.any(x != 0, _axes_or_none(dim, x.ndim), keepdims=keepdim)


@lower("aten::_is_all_true")
def is_all_true(x):
    """Whether every element of a bool array is True."""
    return jnp.all(x)


@lower("aten::_is_any_true")
def is_any_true(x):
    """Whether any element of a bool array is True."""
    return jnp.any(x)


def _axes_or_none(dim, ndim):
    return () if dim in ((), []) else axes(dim, ndim)


@lower("aten::count_nonzero", "aten::count_nonzero.dim_IntList")
def count_nonzero(x, dim=None):
    """How many elements are not 0."""
    return jnp.sum(x != 0, axes(dim, x.ndim))


@lower("aten::logsumexp")
def logsumexp(x, dim, keepdim=False):
    """`log(sum(exp(x)))` without overflow."""
    return jax.nn.logsumexp(floating(wide(x)), axes(dim, x.ndim), keepdims=keepdim)


@lower("aten::linalg_vector_norm")
def vector_norm(x, ord=2, dim=None, keepdim=False, *, dtype=None):
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
def norm(x, p=2):
    """The p-norm of all elements."""
    return vector_norm(x, p)


@lower("aten::norm.ScalarOpt_dim", "aten::norm.ScalarOpt_dim_dtype", "aten::norm.ScalarOpt_dtype")
def norm_dim(x, p=None, dim=None, keepdim=False, *, dtype=None):
    """The p-norm along axes, with p = 2 for None."""
    return vector_norm(x, 2 if p is None else p, dim, keepdim, dtype=dtype)


@lower("aten::trace")
def trace(x):
    """Sum of the diagonal."""
    return jnp.sum(diagonal(x, 0, 0, 1))


@lower("aten::cumsum")
def cumsum(x, dim, *, dtype=None):
    """Running sum; of integers and bools, in the widest integer."""
    return _scan(functools.partial(_where_split, "cumsum", jnp.cumsum), x, dim, dtype)


@lower("aten::cumprod")
def cumprod(x, dim, *, dtype=None):
    """Running product; of integers and bools, in the widest integer."""
    return _scan(functools.partial(_where_split, "cumprod", jnp.cumprod), x, dim, dtype)


def _where_split(verb, function, line, along):
    """Devices give each other totals, and no rows, where the axis may be split."""
    if by_shards(line):
        return run_where_split(verb, along, line)
    return function(whole(line, [along]), along)


def _scan(function, x, dim, dtype):
    if dtype is None and not jnp.issubdtype(x.dtype, jnp.inexact):
        dtype = jax.dtypes.canonicalize_dtype(np.int64)  # as torch promises, unless in place
    line = at_least_1d(wide(x if dtype is None else cast(x, dtype)))
    along = axis(dim, line.ndim)
    return function(line, along).reshape(x.shape)


@lower("aten::logcumsumexp")
def logcumsumexp(x, dim):
    """Running `log(sum(exp(x)))`."""
    return _scan(lambda line, along: running(whole(line, [along]), along), floating(x), dim, None)


@lower("aten::hash_tensor")
def hash_tensor(x, dim=(), *, keepdim=False, mode=0):
    """The exclusive or of the bits of all elements, floats as float64: a `uint64`."""
    kind = jnp.float64 if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.int64
    bits = jax.lax.bitcast_convert_type(x.astype(kind), jnp.uint64)
    along = axes(dim, x.ndim)
    bits = whole(bits, along)  # XLA's CPU devices cannot combine what each of them finds
    found = jax.lax.reduce(bits, np.uint64(0), jax.lax.bitwise_xor, along)
    return jnp.expand_dims(found, along) if keepdim else found
