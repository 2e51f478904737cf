"""Operators along axes: sums, means, extremes and their places, running sums, sorting.

The axes of a reduction are an attribute in older opsets and an input, known while compiling, in
newer ones. Without axes all are reduced, or none where `noop_with_empty_axes` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from isoshard.core.kit import precision_wide as wide

from .operator_arguments import axes_of, axis_of, library, scalar_of
from .registry import largest, operator
from .unsharded_axes import unsharded


def _lowest(dtype):
    return False if dtype == np.bool_ else -np.inf if _is_float(dtype) else jnp.iinfo(dtype).min


def _highest(dtype):
    return True if dtype == np.bool_ else np.inf if _is_float(dtype) else jnp.iinfo(dtype).max


def _is_float(dtype):
    return jnp.issubdtype(dtype, jnp.floating)


def _sum(x, **kwargs):
    """In the dtype of `x`; halves are added up as floats, which JAX does if no dtype is named."""
    return library(x).sum(x, dtype=None if _is_float(x.dtype) else x.dtype, **kwargs)


def _mean(x, **kwargs):
    total = _sum(x, **kwargs)
    count = np.asarray(x.size // max(total.size, 1), x.dtype)
    return total / count if _is_float(x.dtype) else lax.div(total, jnp.full_like(total, count))


def _max(x, **kwargs):
    return library(x).max(x, initial=_lowest(x.dtype), **kwargs)


def _min(x, **kwargs):
    return library(x).min(x, initial=_highest(x.dtype), **kwargs)


def _prod(x, **kwargs):
    return library(x).prod(x, dtype=x.dtype, **kwargs)


def _l1(x, **kwargs):
    return _sum(jnp.abs(x), **kwargs)


def _l2(x, **kwargs):
    return _root(_sum_square(x, **kwargs), x.dtype)


def _root(x, dtype):
    return jnp.sqrt(x if _is_float(dtype) else x.astype(jnp.float32)).astype(dtype)


def _sum_square(x, **kwargs):
    return _sum(x * x, **kwargs)


def _log_sum(x, **kwargs):
    return jnp.log(_sum(x, **kwargs)).astype(x.dtype)


def _log_sum_exp(x, **kwargs):
    return jax.nn.logsumexp(x, **kwargs).astype(x.dtype)


def _register(op_type: str, function: Callable[..., Any], input_since: int, on_host: bool) -> None:
    """Register a reduction with axes as an attribute, and from `input_since` on as an input."""

    def reduced(x, axes, keepdims, noop):
        if axes is None or not len(axes):
            if noop:
                return function(x, axis=(), keepdims=True)
            axes = range(x.ndim)
        dims = {"axis": axes_of(axes, x.ndim), "keepdims": bool(keepdims)}
        if isinstance(x, np.ndarray):
            return function(x, **dims)
        return function(wide(x), **dims).astype(x.dtype)

    host = largest if on_host else None

    @operator(op_type, host=host)
    def by_attribute(x, *, axes=None, keepdims=1):
        return reduced(x, axes, keepdims, 0)

    @operator(op_type, since=input_since, static=("axes",), host=host)
    def by_input(x, axes=None, *, keepdims=1, noop_with_empty_axes=0):
        return reduced(x, axes, keepdims, noop_with_empty_axes)


_register("ReduceSum", _sum, 13, True)
for _op_type, _function, _on_host in (
    ("ReduceMean", _mean, False),
    ("ReduceMax", _max, True),
    ("ReduceMin", _min, True),
    ("ReduceProd", _prod, True),
    ("ReduceL1", _l1, False),
    ("ReduceL2", _l2, False),
    ("ReduceSumSquare", _sum_square, False),
    ("ReduceLogSum", _log_sum, False),
    ("ReduceLogSumExp", _log_sum_exp, False),
):
    _register(_op_type, _function, 18, _on_host)


def _register_arg(op_type: str, find: Callable[..., jax.Array]) -> None:
    @operator(op_type)
    def arg(x, *, axis=0, keepdims=1, select_last_index=0):
        axis = axis_of(axis, x.ndim)
        index = find(jnp.flip(x, axis) if select_last_index else x, axis)
        if select_last_index:
            index = x.shape[axis] - 1 - index
        return jnp.expand_dims(index, axis) if keepdims else index


_register_arg("ArgMax", jnp.argmax)
_register_arg("ArgMin", jnp.argmin)


@operator("CumSum", since=11, static=("axis",), host=lambda inputs: inputs[0].size)
def cumsum(x, axis, *, exclusive=0, reverse=0):
    """The sum of all elements up to each along an axis, itself included or not."""
    axis = axis_of(scalar_of(axis, "axis"), x.ndim)
    np_ = library(x)
    x = x if np_ is np else unsharded(x, [axis])
    y = np_.flip(x, axis) if reverse else x
    total = np_.cumsum(y, axis, dtype=x.dtype)
    if exclusive:
        lead = (slice(None),) * axis
        none, most = total[(*lead, slice(1))], total[(*lead, slice(-1))]
        total = np_.concatenate([np_.zeros_like(none), most], axis)
    return np_.flip(total, axis) if reverse else total


@operator("TopK", since=10, static=("k",))
def top_k(x, k, *, axis=-1, largest=1, sorted=1):
    """The k largest or smallest elements along an axis and their places, in order.

    Of equal elements, the first come first; an unordered result is ordered too.
    """
    axis, count = axis_of(axis, x.ndim), int(scalar_of(k, "k"))
    y = jnp.moveaxis(x, axis, -1)
    key = y if largest else (-y if _is_float(x.dtype) else ~y)
    _, indices = lax.top_k(lax.stop_gradient(key), count)
    values = jnp.take_along_axis(y, indices, -1)
    indices = indices.astype(jax.dtypes.canonicalize_dtype(np.int64))
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(indices, -1, axis)


@operator("TopK")
def top_k_by_attribute(x, *, k, axis=-1):
    """`TopK` before opset 10."""
    return top_k(x, np.asarray(k), axis=axis)
