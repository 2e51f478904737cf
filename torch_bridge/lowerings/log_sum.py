"""`log(exp(x) + exp(y))`, and its running form for complex numbers.

The logarithm of a complex number is defined up to multiples of 2 pi i. torch gives the one near the
operand whose real part is larger (ATen/native/cpu/LogAddExp.h), so the imaginary part may be
beyond pi, and depends on the order in which several numbers are added.

>>> round(float(jax.jit(log_add_exp)(1 - 4.5j, 1 - 4.5j).imag), 5)
-4.5
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def log_add_exp(x: jax.Array, y: jax.Array) -> jax.Array:
    """`log(exp(x) + exp(y))` of two arrays of one floating or complex dtype, broadcast."""
    return _complex(x, y) if jnp.iscomplexobj(x) else jnp.logaddexp(x, y)


def _complex(x: jax.Array, y: jax.Array) -> jax.Array:
    small, large = jnp.where(x.real < y.real, x, y), jnp.where(x.real >= y.real, x, y)
    total = jnp.log1p(jnp.exp(small - large)) + large
    equal_infinities = ~jnp.isfinite(small.real) & (small.real == large.real)
    ends = jnp.where(small.real < 0, small, jnp.log(jnp.exp(small) + jnp.exp(large)))
    unclear = jnp.isnan(x) | jnp.isnan(y)
    return jnp.where(unclear, complex("nan+nanj"), jnp.where(equal_infinities, ends, total))


def running(x: jax.Array, along: int) -> jax.Array:
    """`log(cumsum(exp(x)))` along an axis, in torch's order.

    Complex numbers are added one by one: `lax.cumlogsumexp` has another order, and gives NaN where
    the axis is split over devices, since it adds minus infinity.
    """
    if not jnp.iscomplexobj(x):
        return jax.lax.cumlogsumexp(x, along)
    line = jnp.moveaxis(x, along, 0)

    def step(total: jax.Array, each: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = log_add_exp(each, total)
        return total, total

    nothing = jnp.full(line.shape[1:], complex(-jnp.inf), x.dtype)
    return jnp.moveaxis(jax.lax.scan(step, nothing, line)[1], 0, along)
