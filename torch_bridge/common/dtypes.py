"""Logical torch dtypes and the physical dtypes JAX stores them in.

A tensor is what its dtype says, in all its bits, whether `jax_enable_x64` is on for JAX's own
functions or not: the engine makes arrays and traces programs with it, and leaves it as it was.

>>> import torch
>>> physical_dtype(torch.bfloat16)
dtype(bfloat16)
>>> logical_dtype(jax.numpy.dtype("int32"))
torch.int32

On devices where 64-bit integers cost too much, `XLA_USE_32BIT_LONG=1` in the environment keeps them
in 32 bits, as it does for torch_xla: the *logical* dtype stays `torch.int64`, the *physical* one is
`int32`, and a value that does not fit is an error at the border, never a wrap.
"""

from __future__ import annotations

import functools
import os

import jax
import numpy as np
import torch

_NAMES = {
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.uint16: "uint16",
    torch.uint32: "uint32",
    torch.uint64: "uint64",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
    torch.float8_e4m3fnuz: "float8_e4m3fnuz",
    torch.float8_e5m2fnuz: "float8_e5m2fnuz",
    torch.float8_e8m0fnu: "float8_e8m0fnu",
}
_TORCH = {name: dtype for dtype, name in _NAMES.items()}

BYTES = frozenset({torch.float4_e2m1fn_x2})
"""Dtypes of which a tensor is moved and viewed and not computed with; their bytes are stored."""
_NAMES |= dict.fromkeys(BYTES, "uint8")


def supported() -> set[torch.dtype]:
    """The dtypes that tensors on the device can have."""
    return set(_NAMES)


@functools.cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """The NumPy (or ml_dtypes) dtype with exactly the bits of `dtype`.

    Raises:
        TypeError: JAX has no such dtype (quantised, complex32, ..).
    """
    try:
        return jax.numpy.dtype(_NAMES[dtype])
    except KeyError:
        possible = ", ".join(sorted(str(d).removeprefix("torch.") for d in _NAMES))
        raise TypeError(
            f"{dtype} has no JAX counterpart; possible are {possible}. Convert with .to(dtype)."
        ) from None


NARROW = os.environ.get("XLA_USE_32BIT_LONG", "").lower() in ("1", "true", "yes", "on")
"""Whether 64-bit integers are kept in 32 bits; read when torch's bridge is imported."""

_NARROWED = {torch.int64: torch.int32, torch.uint64: torch.uint32} if NARROW else {}


def physical_dtype(dtype: torch.dtype) -> np.dtype:
    """The dtype of the JAX buffer of a tensor of logical dtype `dtype`."""
    return numpy_dtype(_NARROWED.get(dtype, dtype))


def is_wide(dtype: np.dtype) -> bool:
    """Whether numbers of a dtype have 64 bits; a complex one is two numbers."""
    return (dtype.itemsize == 8 and dtype.kind in "iuf") or dtype.itemsize == 16


def logical_dtype(dtype: np.dtype) -> torch.dtype:
    """The torch dtype with the bits of a JAX array's dtype.

    Raises:
        TypeError: torch has no such dtype (int4, float8_e3m4, ..).
    """
    try:
        return _TORCH[np.dtype(dtype).name]
    except KeyError:
        raise TypeError(
            f"a JAX array of dtype {np.dtype(dtype).name} has no torch counterpart; possible are "
            f"{', '.join(sorted(_TORCH))}. Convert with .astype(..) first."
        ) from None
