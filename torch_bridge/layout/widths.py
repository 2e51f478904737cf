"""64-bit tensors for JAX, which computes in 32 bits unless `jax_enable_x64` is on.

A tensor's buffers have all its bits. JAX without x64 converts such an array to 32 bits in every
operation, and silently wraps integers that do not fit. So an array that is passed to JAX is
converted to JAX's dtype here, with the same values, or an error is raised.

>>> import torch
>>> wide = torch.tensor([1, 2], device="jax")
>>> for_jax(array(wide))
Array([1, 2], dtype=int32)
>>> for_jax(array(wide), "int64").dtype
dtype('int64')
>>> for_jax(array(torch.tensor([1 << 40], device="jax")), name="ids")
Traceback (most recent call last):
    ...
isoshard.core.errors.CopyError: ids: int64 holds values up to 1099511627776, which JAX cannot hold in int32; call jax.config.update('jax_enable_x64', True) first, or pass dtype='int64' to have the array as it is
"""  # noqa: E501

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.errors import CopyError, no_sharing
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.runtime import metrics
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.torch_bridge.common.argument_types import DeviceTensor, DTypeLike, Leaf
from isoshard.torch_bridge.engine.compiling import input_placement
from isoshard.torch_bridge.engine.recording import lazy_tensor


def array(tensor: DeviceTensor) -> Any:
    """The array of a tensor on the `jax` device, not copied."""
    return input_placement.stored_array(lazy_tensor.read(tensor))


def jax_dtype(dtype: DTypeLike) -> np.dtype:
    """The dtype in which JAX computes with arrays of a dtype, as it is set now."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def for_jax(
    x: Leaf, dtype: DTypeLike = None, *, copy: bool | None = None, name: str = "tensor"
) -> jax.Array | UnevenArray:
    """An array as JAX computes with it.

    Args:
        x: a `jax.Array` or an `UnevenArray`, of any dtype.
        dtype: of the result; by default that of `x`, or the one of 32 bits while
            `jax_enable_x64` is off.
        copy: False raises if another dtype takes new memory.
        name: of the tensor, for messages.

    Returns:
        `x` itself if it has the dtype.

    Raises:
        CopyError: 64-bit integers do not fit, floats would be rounded without `dtype`, or `copy` is
            False.
    """
    if isinstance(x, UnevenArray):
        return UnevenArray(for_jax(x.array, dtype, copy=copy, name=name), x.shape, x.sizes)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    want = jax_dtype(x.dtype) if dtype is None else np.dtype(dtype)
    if want == x.dtype:
        return x
    if copy is False:
        raise no_sharing(name, f"{x.dtype} is {want} in JAX while jax_enable_x64 is off")
    if dtype is None:
        _check(x, want, name)
        metrics.count("narrowed")
        metrics.count("narrowed_bytes", x.size * want.itemsize)
    return astype(x, want)


def astype(x: Leaf, dtype: DTypeLike) -> Any:
    """An array, also traced, in another dtype; each device converts what it has."""
    with jax.enable_x64(True):
        if isinstance(x, Tracer) or x.is_fully_addressable:
            return x.astype(dtype)
        arrays = [shard.data.astype(dtype) for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, arrays)


def _check(x: Any, want: np.dtype, name: str) -> None:
    """Raise CopyError if values would change; of a traced array only for its dtype."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise CopyError(
            f"{name}: {x.dtype} would lose precision, as jax_enable_x64 is off. Call "
            "jax.config.update('jax_enable_x64', True) first, pass "
            f"dtype='{want}' to have it rounded, or dtype='{x.dtype}' to have the array as it is"
        )
    if isinstance(x, Tracer):
        return
    limits = np.iinfo(want)
    for shard in x.addressable_shards:
        array = np.asarray(shard.data)  # on the host, whatever mesh the caller has set
        for extreme in (int(array.min()), int(array.max())) if array.size else ():
            if not limits.min <= extreme <= limits.max:
                raise CopyError(
                    f"{name}: {x.dtype} holds values {'up to' if extreme > 0 else 'down to'} "
                    f"{extreme}, which JAX cannot hold in {want}; call "
                    "jax.config.update('jax_enable_x64', True) first, or pass "
                    f"dtype='{x.dtype}' to have the array as it is"
                )
