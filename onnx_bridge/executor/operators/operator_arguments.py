"""Helpers for the arguments of operators: dtypes, axes, NumPy or JAX.

>>> axes_of(np.array([-1, 0]), 3)
(2, 0)
>>> dtype_of(1)                                          # TensorProto.FLOAT
dtype('float32')
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from onnx import helper

from isoshard.core.kit import check_narrowing, device_dtype

from ...errors import ModelError
from .registry import TABLE_LIMIT


def library(*arrays: Any) -> ModuleType:
    """NumPy if all arrays are NumPy's, else `jax.numpy`."""
    return np if all(isinstance(x, np.ndarray | np.generic) for x in arrays) else jnp


def on_device(host: np.ndarray | np.generic, name: str) -> jax.Array:
    """A JAX array of a value known while compiling.

    Example:
        >>> on_device(np.array([7]), "ids").dtype
        dtype('int32')
    """
    host = np.asarray(host)
    dtype = device_dtype(host.dtype, name)
    if dtype != host.dtype:
        check_narrowing(host, dtype, None, name)
    return jnp.asarray(host, dtype)


def dtype_of(code: int) -> np.dtype:
    """The dtype of a `TensorProto.DataType`.

    Returns:
        The dtype, int64 as int64.
    """
    if code not in onnx.TensorProto.DataType.values():
        raise ModelError(f"there is no tensor type {code}")
    name = onnx.TensorProto.DataType.Name(code)
    dtype = None if name in ("STRING", "UNDEFINED") else helper.tensor_dtype_to_np_dtype(code)
    try:
        return jnp.dtype(dtype) if dtype is not None else _none(name)
    except TypeError:
        _none(name)
        raise


def physical(dtype: np.dtype) -> np.dtype:
    """The dtype in which a JAX array holds values of `dtype`."""
    return device_dtype(dtype, f"a tensor of {dtype}")


def axis_of(axis: int, rank: int) -> int:
    """An axis counted from the front."""
    if not -rank <= axis < rank:
        raise ModelError(f"axis {axis} of a tensor of rank {rank}: {-rank}..{rank - 1} are there")
    return int(axis) % rank


def axes_of(axes: Sequence[int] | np.ndarray, rank: int) -> tuple[int, ...]:
    """Axes counted from the front, each once."""
    axes_ = tuple(axis_of(int(axis), rank) for axis in np.asarray(axes).reshape(-1))
    if len(set(axes_)) != len(axes_):
        raise ModelError(f"axes {[int(a) for a in axes]} of rank {rank} name an axis twice")
    return axes_


def sizes_of(sizes: np.ndarray) -> tuple[int, ...]:
    """A static input as a tuple of Python integers."""
    return tuple(int(size) for size in np.asarray(sizes).reshape(-1))


def scalar_of(value: np.ndarray, role: str) -> Any:
    """The one element of a static input."""
    if value.size != 1:
        raise ModelError(f"{role} has shape {value.shape}, and one element is wanted")
    return value.reshape(()).item()


def choice(value: str, role: str, possible: Sequence[str]) -> str:
    """An attribute that is one of a few words."""
    if value not in possible:
        raise ModelError(f"{role} is {value!r}; possible are {', '.join(map(repr, possible))}")
    return value


def bounded(count: int, role: str) -> None:
    """Refuse a table that is too large to be made while compiling."""
    if count > TABLE_LIMIT:
        raise ModelError(f"{role} are {count} numbers, more than {TABLE_LIMIT}")


def _none(name: str) -> np.dtype:
    raise ModelError(f"tensors of type {name} have no counterpart in JAX")
