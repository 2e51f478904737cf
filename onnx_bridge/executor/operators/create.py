"""Operators that make tensors, or change their dtype: constants, ranges, masks, casts.

Of the types with 64 bits, integers are stored in 32 bits while `jax_enable_x64` is off, and floats
are refused then, as everywhere in isoshard.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from onnx import numpy_helper

from ...errors import ModelError
from .operator_arguments import axis_of, dtype_of, library, on_device, physical, scalar_of, sizes_of
from .registry import HOST_LIMIT, largest, operator

_SATURATING = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")


@operator("Constant")
def constant(
    *,
    value=None,
    value_float=None,
    value_floats=None,
    value_int=None,
    value_ints=None,
    sparse_value=None,
    value_string=None,
    value_strings=None,
):
    """The attribute that the node has, known while compiling."""
    if value is not None:
        return numpy_helper.to_array(value)
    for attribute, dtype in (
        (value_float, np.float32),
        (value_floats, np.float32),
        (value_int, np.int64),
        (value_ints, np.int64),
    ):
        if attribute is not None:
            return np.asarray(attribute, dtype)
    kind = "a sparse tensor" if sparse_value is not None else "strings"
    raise ModelError(f"the constant is {kind}, which JAX does not have")


@operator("ConstantOfShape", static=("shape",), host=lambda inputs: math.prod(inputs[0].tolist()))
def constant_of_shape(shape, *, value=None):
    """One value everywhere, by default 0.0 in float32."""
    fill = np.zeros(1, np.float32) if value is None else numpy_helper.to_array(value)
    sizes = sizes_of(shape)
    if math.prod(sizes) <= HOST_LIMIT:
        return np.full(sizes, scalar_of(fill, "value"), fill.dtype)
    return jnp.broadcast_to(on_device(fill, "value").reshape(()), sizes)


def _count(bounds):
    first, last, step = (scalar_of(x, "a bound of Range") for x in bounds)
    if step == 0:
        raise ModelError("the delta of Range is 0")
    return max(math.ceil((last - first) / step), 0)


@operator("Range", since=11, static=("start", "limit", "delta"), host=_count)
def range_(start, limit, delta):
    """start, start + delta, .. before limit."""
    first, last, step = (x.item() for x in (start, limit, delta))
    count = _count((start, limit, delta))
    if count <= HOST_LIMIT:
        return (first + np.arange(count) * step).astype(start.dtype)
    ends = on_device(np.asarray([first, last, step], start.dtype), "a bound of Range")
    return ends[0] + jax.lax.iota(ends.dtype, count) * ends[2]


@operator("EyeLike", since=9)
def eye_like(x, *, dtype=None, k=0):
    """Ones on the k-th diagonal of a matrix of the input's shape."""
    return jnp.eye(*x.shape, k=k, dtype=x.dtype if dtype is None else physical(dtype_of(dtype)))


@operator("Trilu", since=14)
def trilu(x, k=None, *, upper=1):
    """The matrices with zeros below (`upper=0`: above) their k-th diagonal."""
    shift = jnp.int32(0) if k is None else k.reshape(()).astype(jnp.int32)
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, x.shape[-2:], axis) for axis in (0, 1))
    mask = columns >= rows + shift if upper else columns <= rows + shift
    return jnp.where(mask, x, jnp.zeros((), x.dtype))


@operator("OneHot", since=9, static=("depth",))
def onehot(indices, depth, values, *, axis=-1):
    """The second of `values` where an index points along a new axis, the first elsewhere."""
    depth = int(scalar_of(depth, "depth"))
    axis = axis_of(axis, indices.ndim + 1)
    indices_ = jnp.where(indices < 0, indices + depth, indices).astype(jnp.int32)
    counting = jax.lax.broadcasted_iota(
        jnp.int32, [*indices.shape[:axis], depth, *indices.shape[axis:]], axis
    )
    return jnp.where(jnp.expand_dims(indices_, axis) == counting, values[1], values[0])


@operator("Cast", since=6, host=largest)
def cast(x, *, to, saturate=1, round_mode="up"):
    """The values in another dtype; floats are truncated to integers."""
    return _cast(x, dtype_of(to), saturate)


@operator("CastLike", since=15)
def cast_like(x, target_type, *, saturate=1, round_mode="up"):
    """The values in the dtype of another tensor."""
    return _cast(x, target_type.dtype, saturate)


def _cast(x, dtype, saturate):
    np_ = library(x)
    dtype = dtype if np_ is np else physical(dtype)
    if dtype.name in _SATURATING and saturate:
        top = jnp.finfo(dtype).max.astype(x.dtype)
        x = np_.clip(x, -top, top)
    return x.astype(dtype)
