"""Checks that a tensor's data has the length of its dims and dtype, before any allocation.

>>> tensor = TensorProto(name="w", data_type=1, dims=[1 << 40, 4], raw_data=bytes(16))
>>> error_of(tensor)
'shape (1099511627776, 4) of FLOAT is 17592186044416 bytes, but it has 16'
"""

from __future__ import annotations

import math

from onnx import TensorProto

BITS: dict[int, int] = {
    **dict.fromkeys((TensorProto.DOUBLE, TensorProto.INT64, TensorProto.UINT64), 64),
    **dict.fromkeys((TensorProto.FLOAT, TensorProto.INT32, TensorProto.UINT32), 32),
    **dict.fromkeys((TensorProto.FLOAT16, TensorProto.BFLOAT16), 16),
    **dict.fromkeys((TensorProto.INT16, TensorProto.UINT16), 16),
    **dict.fromkeys((TensorProto.INT8, TensorProto.UINT8, TensorProto.BOOL), 8),
    TensorProto.COMPLEX64: 64,
    TensorProto.COMPLEX128: 128,
}
_LEAST_BITS = 2  # of the packed types, which newer versions of ONNX keep adding
_MOST_AXES = 64


def bytes_of(tensor: TensorProto) -> int | None:
    """The bytes of a tensor's shape and dtype."""
    bits = BITS.get(tensor.data_type)
    return None if bits is None else math.prod(tensor.dims) * bits // 8


def type_name(code: int) -> str:
    """The name of an element type, or its number if this version of onnx has none."""
    is_defined = code in TensorProto.DataType.values()
    return TensorProto.DataType.Name(code) if is_defined else f"type {code}"


def shape_error(tensor: TensorProto) -> str | None:
    """What is wrong with a tensor's dims and type."""
    if len(tensor.dims) > _MOST_AXES:
        return f"it has {len(tensor.dims)} axes, the most is {_MOST_AXES}"
    if any(size < 0 for size in tensor.dims):
        return f"a size in its shape {tuple(tensor.dims)} is negative"
    is_defined = tensor.data_type in TensorProto.DataType.values()
    if not is_defined or tensor.data_type == TensorProto.UNDEFINED:
        return f"there is no element type {tensor.data_type}"
    if tensor.HasField("segment"):
        return "it is one segment of a tensor, which is not read"
    return None


def error_of(tensor: TensorProto) -> str | None:
    """What is wrong with a tensor that holds its own data."""
    wrong = shape_error(tensor)
    if wrong:
        return wrong
    shape, kind = tuple(tensor.dims), type_name(tensor.data_type)
    elements = math.prod(shape)
    if tensor.data_type == TensorProto.STRING:
        count = len(tensor.string_data)
        return None if count == elements else f"shape {shape} of strings, but it has {count}"
    if tensor.HasField("raw_data"):
        need, count = bytes_of(tensor), len(tensor.raw_data)
        if need is None:
            fits = elements * _LEAST_BITS <= 8 * count
            return None if fits else f"shape {shape} of {kind} does not fit into {count} bytes"
        if need == count:
            return None
        return f"shape {shape} of {kind} is {need} bytes, but it has {count}"
    count = _typed(tensor)
    if tensor.data_type not in BITS:
        fits = elements * _LEAST_BITS <= 32 * count
    else:
        pair = tensor.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128)
        fits = elements * (2 if pair else 1) == count
    return None if fits else f"shape {shape} of {kind}, but it has {count} numbers"


def _typed(tensor: TensorProto) -> int:
    """How many numbers the field for the tensor's type has."""
    kind = tensor.data_type
    if kind in (TensorProto.FLOAT, TensorProto.COMPLEX64):
        return len(tensor.float_data)
    if kind in (TensorProto.DOUBLE, TensorProto.COMPLEX128):
        return len(tensor.double_data)
    if kind == TensorProto.INT64:
        return len(tensor.int64_data)
    if kind in (TensorProto.UINT64, TensorProto.UINT32):
        return len(tensor.uint64_data)
    return len(tensor.int32_data)
