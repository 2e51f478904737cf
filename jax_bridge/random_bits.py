"""Random bits written out as arithmetic, which XLA fuses with the operations that read them.

XLA on CPU computes JAX's random bits in a loop over complete arrays: for an array of float32 it
allocates three temporaries of its size (for bfloat16 eight). Written out, the bits of an element
depend on its own position only, and nothing but the result needs memory:

>>> from isoshard.core.runtime._jax_internals.jaxpr_classes import jaxpr_as_fun
>>> make = jax.make_jaxpr(lambda key: jax.random.normal(key, (256, 64)))
>>> key = jax.random.key(0)
>>> fused = jax.jit(jaxpr_as_fun(write_out(make(key))))
>>> fused.lower(key).compile().memory_analysis().temp_size_in_bytes < 256
True
>>> bool(jnp.allclose(fused(key)[0], jax.random.normal(key, (256, 64)), atol=1e-6))
True

The bits are the same. Left as they are: generators other than JAX's default, many keys at once
(`vmap`), arrays of 2**32 elements and more, and all bits if `jax_threefry_partitionable` is off.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Threefry-2x32-20).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.runtime._jax_internals.jaxpr_classes import ClosedJaxpr, JaxprEqn
from isoshard.core.runtime.jaxprs import JaxprRewriter, opened

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
_MOST = 1 << 32  # elements that one 32-bit counter tells apart


def write_out(traced: ClosedJaxpr) -> ClosedJaxpr:
    """Replace the random bits of a traced function by the arithmetic that computes them.

    Args:
        traced: by `jax.make_jaxpr`.
    """
    return _WrittenOut().program(traced)


class _WrittenOut(JaxprRewriter):
    def equation(self, eqn: JaxprEqn, context: Any) -> Iterator[JaxprEqn]:
        if eqn.primitive.name == "random_bits" and _is_served(eqn):
            yield _call(eqn)
        else:
            yield self.inside(eqn, context)


def _is_served(step: JaxprEqn) -> bool:
    key: Any = step.invars[0].aval
    default = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
    return (
        bool(jax.config.jax_threefry_partitionable)
        and (key.shape, key.dtype) == ((), default.dtype)
        and math.prod(step.params["shape"]) < _MOST
    )


def _call(step: JaxprEqn) -> JaxprEqn:
    """The step as a call of `_bits`."""
    bits = functools.partial(_bits, step.params["bit_width"], step.params["shape"])
    [call] = opened(jax.make_jaxpr(jax.jit(bits))(step.invars[0].aval)).eqns
    return step.replace(primitive=call.primitive, params=call.params)


def _bits(width: int, shape: tuple[int, ...], key: Any) -> jax.Array:
    """The bits that `jax.random.bits` draws: each element encrypts its own index."""
    first, second = jax.random.key_data(key)
    index = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        step = np.uint32(math.prod(shape[axis + 1 :]))
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * step
    high, low = _threefry(first, second, jnp.zeros(shape, jnp.uint32), index)
    kind = jnp.dtype(f"uint{width}")
    if width == 64:
        return high.astype(kind) << np.uint64(32) | low.astype(kind)
    return (high ^ low).astype(kind)


def _threefry(k0: jax.Array, k1: jax.Array, x0: jax.Array, x1: jax.Array) -> Any:
    """Encrypt pairs of 32 bits in 20 rounds; a word of the key is added after every four."""
    keys = (k0, k1, k0 ^ k1 ^ _PARITY)
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for turn in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ (x1 << np.uint32(turn) | x1 >> np.uint32(32 - turn))
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1
