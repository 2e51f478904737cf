"""An array's memory as bits: seen in another dtype, and written to without arithmetic.

>>> bitcast(jnp.ones(2, "float32"), (2, 2), jnp.dtype("uint16")).tolist()
[[0, 16256], [0, 16256]]
>>> of_units(as_units(jnp.ones(2, "float32"), 2), (2,), jnp.dtype("float32")).tolist()
[1.0, 1.0]
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.torch_bridge.lowerings import index_updates


def put(base: jax.Array, indices: np.ndarray, values: jax.Array) -> jax.Array:
    """Scatter as bits: XLA on the CPU computes with bfloat16 in float32, which alters a NaN."""
    if jnp.iscomplexobj(base):
        return index_updates.put(base, indices, values)
    unit = base.dtype.itemsize
    flat = index_updates.put(
        as_units(base, unit), indices.ravel(), as_units(values.astype(base.dtype), unit)
    )
    return of_units(flat, base.shape, base.dtype)


def as_units(x: jax.Array, unit: int) -> jax.Array:
    """The memory of an array, flat, in unsigned integers of so many bytes."""
    if x.dtype == bool:
        x = x.astype(np.uint8)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], axis=-1)
    return _recast(x, unit, np.dtype(f"uint{8 * unit}"))


def of_units(flat: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """The array whose memory `as_units` gave."""
    if np.dtype(dtype).kind == "b":
        return (flat != 0).reshape(shape)
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return _recast(flat, dtype.itemsize, dtype).reshape(shape)
    halves = _recast(flat, dtype.itemsize // 2, np.dtype(f"float{4 * dtype.itemsize}"))
    return jax.lax.complex(halves[0::2], halves[1::2]).reshape(shape)


def _recast(x: jax.Array, width: int, dtype: np.dtype) -> jax.Array:
    """The same memory, flat, as elements of another dtype of so many bytes."""
    if x.dtype.itemsize < width:
        x = x.reshape(-1, width // x.dtype.itemsize)
    return jax.lax.bitcast_convert_type(x, dtype).reshape(-1)


def _unit(dtype: Any) -> int:
    """The bytes of an element, or of a complex number's part."""
    return np.dtype(dtype).itemsize // (1 + (np.dtype(dtype).kind == "c"))


def bitcast(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """The same memory as an array of another dtype and shape."""
    if any(np.dtype(kind).kind in "bc" for kind in (x.dtype, dtype)):
        return of_units(as_units(x, min(_unit(x.dtype), _unit(dtype))), shape, np.dtype(dtype))
    ratio = np.dtype(x.dtype).itemsize / np.dtype(dtype).itemsize
    if ratio < 1:
        times = round(1 / ratio)
        x = x.reshape(*x.shape[:-1], x.shape[-1] // times, times)
    return jax.lax.bitcast_convert_type(x, dtype).reshape(shape)
