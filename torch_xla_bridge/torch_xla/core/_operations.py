"""XLA's operations by their names in its builder, as functions of JAX arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

DTYPES = {
    "f32": "float32",
    "f64": "float64",
    "bf16": "bfloat16",
    "f16": "float16",
    "u8": "uint8",
    "s8": "int8",
    "u16": "uint16",
    "s16": "int16",
    "u32": "uint32",
    "s32": "int32",
    "u64": "uint64",
    "s64": "int64",
    "c64": "complex64",
    "c128": "complex128",
    "pred": "bool",
}
"""XLA's names of dtypes, and NumPy's."""


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of two arrays of one shape, for two that broadcast."""
    return lambda a, b: function(*jnp.broadcast_arrays(a, b))


def _reshape(a: Any, sizes: Any, dimensions: Any = None, inferred_dimension: Any = None) -> Any:
    return lax.reshape(a, tuple(sizes), None if dimensions is None else tuple(dimensions))


def _dynamic_slice(a: Any, *starts: Any, slice_sizes: Sequence[int]) -> Any:
    return lax.dynamic_slice(a, starts, tuple(slice_sizes))


def _dynamic_update_slice(a: Any, update: Any, *starts: Any) -> Any:
    return lax.dynamic_update_slice(a, update, starts)


def _window(a: Any, init: Any, computation: Any, dimensions: Any, strides: Any, pad: str) -> Any:
    return lax.reduce_window(
        a, init, computation, tuple(dimensions), tuple(strides), str(pad).upper()
    )


def _max_pool(a: Any, kernel_size: Any, stride: Any, padding: str = "valid", **where: Any) -> Any:
    least = -jnp.inf if jnp.issubdtype(a.dtype, jnp.inexact) else jnp.iinfo(a.dtype).min
    return _window(a, jnp.array(least, a.dtype), lax.max, kernel_size, stride, padding)


def _cond(pred: Any, when: Any, otherwise: Any, true_computation: Any, false_computation: Any):
    return lax.cond(
        pred,
        lambda a, b: true_computation(a),
        lambda a, b: false_computation(b),
        when,
        otherwise,
    )


def _while(state: Any, condition_computation: Any, body_computation: Any) -> Any:
    return lax.while_loop(condition_computation, body_computation, state)


def _sort(*arrays: Any, comparator: Any, dimension: int | None = None, is_stable: Any = None):
    """Sort by counting the elements before each: a custom comparator allows no faster way."""
    axis = arrays[0].ndim - 1 if dimension is None else dimension
    moved = [jnp.moveaxis(array, axis, -1) for array in arrays]
    size = moved[0].shape[-1]
    pairs = [side for array in moved for side in (array[..., None, :], array[..., :, None])]
    before = jnp.vectorize(comparator)(*pairs)  # [.., i, j]: whether j comes before i
    after = jnp.swapaxes(before, -1, -2)
    earlier = jnp.arange(size)[None, :] < jnp.arange(size)[:, None]
    rank = jnp.sum(before | (~after & earlier), -1)
    order = jnp.argsort(rank, axis=-1)
    done: Any = tuple(jnp.moveaxis(jnp.take_along_axis(a, order, -1), -1, axis) for a in moved)
    return done if len(done) > 1 else done[0]


def _solve(a: Any, b: Any, left_side: Any, lower: Any, unit_diagonal: Any, transpose_a: Any) -> Any:
    return lax.linalg.triangular_solve(
        a,
        b,
        left_side=bool(left_side),
        lower=bool(lower),
        unit_diagonal=bool(unit_diagonal),
        transpose_a=bool(transpose_a),
    )


GROUPS = ("feature_group_count", "batch_group_count", "precision_config")
AXES = (
    "input_batch_dimension",
    "input_feature_dimension",
    "kernel_input_feature_dimension",
    "kernel_output_feature_dimension",
    "output_batch_dimension",
    "output_feature_dimension",
    "input_spatial_dimensions",
    "kernel_spatial_dimensions",
    "output_spatial_dimensions",
)
"""Arguments of convolutions, in the order of torch_xla's methods."""

_PLACES = {  # of XLA's names for the axes of a convolution, the letters of JAX's
    "input": ("N", "C", "input_batch_dimension", "input_feature_dimension"),
    "kernel": ("O", "I", "kernel_output_feature_dimension", "kernel_input_feature_dimension"),
    "output": ("N", "C", "output_batch_dimension", "output_feature_dimension"),
}


def _conv(
    a: Any,
    kernel: Any,
    window_strides: Sequence[int],
    padding: Any = "valid",
    lhs_dilation: Any = None,
    rhs_dilation: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision_config: Any = None,
    **axes: Any,
) -> Any:
    layouts = []
    for role, (first, second, first_at, second_at) in _PLACES.items():
        letters = [""] * a.ndim
        letters[axes.get(first_at, 0)], letters[axes.get(second_at, 1)] = first, second
        spatial = axes.get(f"{role}_spatial_dimensions", range(2, a.ndim))
        for index, axis in enumerate(spatial):
            letters[axis] = str(index)
        layouts.append("".join(letters))
    return lax.conv_general_dilated(
        a,
        kernel,
        tuple(window_strides),
        padding.upper() if isinstance(padding, str) else [tuple(pair) for pair in padding],
        None if lhs_dilation is None else tuple(lhs_dilation),
        None if rhs_dilation is None else tuple(rhs_dilation),
        dimension_numbers=lax.conv_dimension_numbers(a.shape, kernel.shape, tuple(layouts)),
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
    )


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Add": jnp.add,
    "Sub": jnp.subtract,
    "Mul": jnp.multiply,
    "Dot": jnp.dot,
    "Div": _unary(lax.div),
    "Pow": jnp.power,
    "Rem": _unary(lax.rem),
    "And": jnp.bitwise_and,
    "Or": jnp.bitwise_or,
    "Xor": jnp.bitwise_xor,
    "Eq": jnp.equal,
    "Ne": jnp.not_equal,
    "Le": jnp.less_equal,
    "Lt": jnp.less,
    "Ge": jnp.greater_equal,
    "Gt": jnp.greater,
    "ShiftLeft": jnp.left_shift,
    "ShiftRight": jnp.right_shift,
    "Max": jnp.maximum,
    "Min": jnp.minimum,
    "Atan2": jnp.arctan2,
    "Neg": jnp.negative,
    "Not": jnp.bitwise_not,
    "Acos": jnp.arccos,
    "Asin": jnp.arcsin,
    "Atan": jnp.arctan,
    "Ceil": jnp.ceil,
    "Cos": jnp.cos,
    "Cosh": jnp.cosh,
    "Erf": lax.erf,
    "Erfc": lax.erfc,
    "ErfInv": lax.erf_inv,
    "Exp": jnp.exp,
    "Expm1": jnp.expm1,
    "Floor": jnp.floor,
    "Log": jnp.log,
    "Log1p": jnp.log1p,
    "Sqrt": jnp.sqrt,
    "Rsqrt": lax.rsqrt,
    "Real": jnp.real,
    "Imag": jnp.imag,
    "Conj": jnp.conj,
    "Clz": lax.clz,
    "Sin": jnp.sin,
    "Sinh": jnp.sinh,
    "Tan": jnp.tan,
    "Tanh": jnp.tanh,
    "Reshape": _reshape,
    "Broadcast": lambda a, sizes: lax.broadcast(a, tuple(sizes)),
    "BroadcastInDim": lambda a, sizes, dimensions: lax.broadcast_in_dim(
        a, tuple(sizes), tuple(dimensions)
    ),
    "Slice": lambda a, start_indices, limit_indices, strides: lax.slice(
        a, tuple(start_indices), tuple(limit_indices), tuple(strides)
    ),
    "SliceInDim": lambda a, start_index, limit_index, dimno, stride: lax.slice_in_dim(
        a, start_index, limit_index, stride, dimno
    ),
    "DynamicSlice": _dynamic_slice,
    "DynamicUpdateSlice": _dynamic_update_slice,
    "Conv": _conv,
    "Convert": lambda a, to_type: lax.convert_element_type(a, DTYPES[to_type]),
    "BitcastConvert": lambda a, to_type: lax.bitcast_convert_type(a, jnp.dtype(DTYPES[to_type])),
    "Pad": lambda a, value, config: lax.pad(a, value, [tuple(padding) for padding in config]),
    "Reduce": lambda a, init, computation, dimensions: lax.reduce(
        a, init, computation, tuple(dimensions)
    ),
    "ReduceAll": lambda a, init, computation: lax.reduce(
        a, init, computation, tuple(range(a.ndim))
    ),
    "ReduceWindow": lambda a, init, computation, window_dimensions, window_strides, padding: (
        _window(a, init, computation, window_dimensions, window_strides, padding)
    ),
    "MaxPool": _max_pool,
    "Select": lax.select,
    "Transpose": lambda a, permutation: lax.transpose(a, tuple(permutation)),
    "TriangularSolve": _solve,
    "Clamp": lambda a, least, most: lax.clamp(least, a, most),
    "Tuple": lambda *values: values,
    "GetTupleElement": lambda values, index: values[index],
    "Conditional": _cond,
    "While": _while,
    "Call": lambda *values, computation: computation(*values),
    "Map": lambda *values, computation, dimensions=None: jnp.vectorize(computation)(*values),
    "Sort": _sort,
    "Rev": lambda a, dimensions: lax.rev(a, tuple(dimensions)),
    "ConcatInDim": lambda *values, dimension: lax.concatenate(values, dimension),
    "GetDimensionSize": lambda a, dimension: jnp.int32(a.shape[dimension]),
    "Iota": lambda shape, iota_dimension: lax.broadcasted_iota(
        DTYPES[shape["type"]], tuple(shape["sizes"]), iota_dimension
    ),
}
"""Of arrays, and of the arguments that XLA's builder has for them."""


def struct(shape: Any) -> Any:
    """A shape of the builder, `{"type": "f32", "sizes": (2,)}` or a sequence of them, as JAX's."""
    if isinstance(shape, list | tuple):
        return tuple(map(struct, shape))
    return jax.ShapeDtypeStruct(tuple(shape["sizes"]), jnp.dtype(DTYPES[shape["type"]]))


_OF_DTYPE = {dtype: name for name, dtype in DTYPES.items()}


def written(aval: Any) -> Any:
    """A shape of JAX as the builder has it; the inverse of `struct`."""
    if isinstance(aval, list | tuple):
        return tuple(map(written, aval))
    return {"type": _OF_DTYPE[jnp.dtype(aval.dtype).name], "sizes": tuple(aval.shape)}
