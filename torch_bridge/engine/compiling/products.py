"""Products of matrices whose rows are still several axes.

>>> x = Matrix(jnp.ones((2, 3, 4)), False)               # 6 rows, before they were merged
>>> weight = Matrix(jnp.ones((5, 4)), True)              # a layer multiplies with its transpose
>>> merged, apart = product(x, weight)
>>> merged.shape, apart.shape
((6, 5), (2, 3, 5))
>>> gradient, apart = product(Matrix(jnp.ones((2, 3, 5)), True), x)
>>> gradient.shape, apart
((5, 4), None)
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp  # noqa: F401  (for the doctest)

from isoshard.torch_bridge.lowerings.integer_products import dot_general

TURN = ("permute", (1, 0))
"""The view operation that transposes a matrix."""


class Matrix(NamedTuple):
    """A matrix as it was before its rows were merged, and before it was transposed.

    Attributes:
        array: of shape `(*rows, columns)`.
        turned: whether what is meant is the transpose.
    """

    array: Any
    turned: bool

    def turn(self) -> Matrix:
        """The transpose."""
        return Matrix(self.array, not self.turned)

    def merge(self) -> Matrix:
        """The same with one axis of rows."""
        return Matrix(self.array.reshape(-1, self.array.shape[-1]), self.turned)

    def axes(self, side: int) -> tuple[int, ...]:
        """The axes of `array` that are the rows (0) or the columns (1) of what is meant."""
        last = self.array.ndim - 1
        return (last,) if bool(side) != self.turned else tuple(range(last))

    def extents(self, side: int) -> tuple[int, ...]:
        """Their extents."""
        return tuple(self.array.shape[axis] for axis in self.axes(side))


def product(a: Matrix, b: Matrix, sums: Any = None) -> tuple[Any, Any]:
    """Multiply two matrices without merging or transposing them first.

    Args:
        a: of m rows and k columns.
        b: of k rows and n columns.
        sums: dtype of the product; by default that of both.

    Returns:
        The product, of shape (m, n), and the same with the rows of `a` as its several axes; None
        if they are one.
    """
    if b.array.ndim > 2 and (b.turned or a.extents(1) != b.extents(0)):
        b = b.merge()
    if a.turned and a.extents(1) != b.extents(0):
        a = a.merge()
    contract = a.axes(1), b.axes(0)
    axes = (contract, ((), ()))
    out = dot_general(a.array, b.array, axes, preferred_element_type=sums)
    if out.ndim == 2:
        return out, None
    return out.reshape(math.prod(out.shape[:-1]), out.shape[-1]), out
