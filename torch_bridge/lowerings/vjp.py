"""Backward operators that torch names and JAX derives.

torch differentiates `mish(x)` by calling `mish_backward(grad, x)`. With the forward lowering at
hand that operator is its vector-Jacobian product:

>>> import jax.numpy as jnp
>>> cube = by_vjp(lambda x: x**3)
>>> print(cube(jnp.ones(2), jnp.array([1.0, 2.0])))
[ 3. 12.]

XLA removes the unused forward result, so only the backward is paid for. Beware of ties: JAX gives
`maximum` half a gradient on each side where torch gives it to one; such operators are written out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def pull_back(
    forward: Callable[..., jax.Array], grad: jax.Array, *primals: jax.Array
) -> tuple[jax.Array, ...]:
    """The gradient of each primal.

    Args:
        forward: function of the primals with one result.
        grad: gradient of that result, of its shape; any float dtype.
        *primals: where to differentiate.

    Returns:
        One array per primal, of its shape and dtype.
    """
    value, back = jax.vjp(forward, *primals)
    return back(grad.astype(value.dtype))


def by_vjp(forward: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The backward operator `(grad, x, *options) -> grad of x` of `forward(x, *options)`."""

    def backward(grad: jax.Array, x: jax.Array, *options: Any, **named: Any) -> jax.Array:
        return pull_back(lambda primal: forward(primal, *options, **named), grad, x)[0]

    return backward
