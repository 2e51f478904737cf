"""Device dtypes: the dtype that JAX stores host values in, and whether every value is preserved.

While `jax_enable_x64` is off, JAX has no 64-bit types. Integers become 32-bit ones if every value
fits. Floats lose precision: `iso.shard` and `iso.to_jax` round them, as `jnp.asarray` does
(`jax_dtype`); where values must be preserved (torch tensors, files, checkpoints, ONNX) they raise
(`device_dtype`).

>>> device_dtype(np.dtype("int64"))
dtype('int32')
>>> check_narrowing(np.array([1 << 40]), np.dtype("int32"), None, "ids")
Traceback (most recent call last):
    ...
isoshard.core.errors.CopyError: ids: int64 is stored as int32 while jax_enable_x64 is off, and the values 1099511627776..1099511627776 do not fit -2147483648..2147483647. Call jax.config.update('jax_enable_x64', True) first.
"""  # noqa: E501

from __future__ import annotations

import jax
import numpy as np

from isoshard.core.errors import CopyError, no_sharing
from isoshard.core.runtime.caches import cached


def device_dtype(dtype: np.dtype, name: str = "array") -> np.dtype:
    """The dtype of a device buffer that preserves every host value of `dtype`.

    Returns:
        The same dtype; for 64-bit integers while `jax_enable_x64` is off, the 32-bit one.

    Raises:
        CopyError: JAX has no such dtype, or only a less exact one.

    Example:
        >>> device_dtype(np.dtype("float64"), "weight")
        Traceback (most recent call last):
            ...
        isoshard.core.errors.CopyError: weight: float64 would lose precision, as jax_enable_x64 is off. Convert it with .astype('float32'), or call jax.config.update('jax_enable_x64', True) first.
    """  # noqa: E501
    stored = jax_dtype(dtype, name)
    if stored != dtype and not np.issubdtype(dtype, np.integer):
        raise CopyError(
            f"{name}: {dtype} would lose precision, as jax_enable_x64 is off. Convert it with "
            f".astype('{stored}'), or call jax.config.update('jax_enable_x64', True) first."
        )
    return stored


def jax_dtype(dtype: np.dtype, name: str = "array") -> np.dtype:
    """The dtype that `jnp.asarray` stores host values of `dtype` in.

    Returns:
        The same dtype; of 64-bit ones while `jax_enable_x64` is off, the 32-bit one.

    Raises:
        CopyError: JAX has no such dtype.

    Example:
        >>> jax_dtype(np.dtype("float64"))
        dtype('float32')
    """
    stored, message = _jax_dtype(dtype, jax.dtypes.canonicalize_dtype(np.int64) == np.int64)
    if message:
        raise CopyError(f"{name}: {message}")
    return stored


@cached(256)
def is_supported(dtype: np.dtype, x64: bool) -> bool:
    """Whether JAX stores host values of `dtype` in that dtype, with 64 bits on or off.

    Example:
        >>> is_supported(np.dtype("int64"), True), is_supported(np.dtype("int64"), False)
        (True, False)
    """
    return _jax_dtype(dtype, x64) == (dtype, "")


def check_narrowing(
    host: np.ndarray, dtype: np.dtype, copy: bool | None, name: str = "array"
) -> None:
    """Raise unless 64-bit values may be stored in 32 bits; every integer is checked.

    JAX itself would wrap integers that do not fit. Floats are rounded, and infinite beyond the
    range, as in JAX.

    Args:
        host: of a 64-bit dtype.
        dtype: the 32-bit one.
        copy: as for `to_jax`; storing in fewer bits is a copy.
        name: of the array, for messages.

    Raises:
        CopyError: copy is False, or a value does not fit.
    """
    if copy is False:
        raise no_sharing(name, f"{host.dtype} is stored as {dtype} while jax_enable_x64 is off")
    if host.size == 0 or not np.issubdtype(dtype, np.integer):
        return
    limits = np.iinfo(dtype)
    low, high = int(host.min()), int(host.max())
    if low < limits.min or high > limits.max:
        raise CopyError(
            f"{name}: {host.dtype} is stored as {dtype} while jax_enable_x64 is off, and the "
            f"values {low}..{high} do not fit {limits.min}..{limits.max}. Call "
            "jax.config.update('jax_enable_x64', True) first."
        )


_LONG = (np.longdouble, np.clongdouble)


@cached(256)
def _jax_dtype(dtype: np.dtype, x64: bool) -> tuple[np.dtype, str]:
    numeric = jax.numpy.issubdtype(dtype, np.number) or dtype == np.bool_
    if not numeric or not dtype.isnative or dtype.type in _LONG:
        return dtype, (
            f"JAX has no dtype {dtype.str if numeric else dtype}. Convert it with .astype(..) to a "
            "numeric dtype in this machine's byte order, or leave it out."
        )
    with jax.enable_x64(x64):
        return np.dtype(jax.dtypes.canonicalize_dtype(dtype)), ""
