"""Rewrites of the tape that XLA does not find by itself.

torch computes a layer as `addmm(bias, x, t(weight))`, and its autograd the gradient of the weight
as `t(mm(t(x), g))`. XLA for CPU keeps those transposes and the copies they cost; a dot product with
other contraction axes needs none. Over a mesh a split weight is then gathered once for both
directions, not once as it is and once transposed.

torch's `matmul` merges all batch axes into one before it calls `bmm`, and a layer those of its rows
before it calls `addmm`. If two of them are split over the mesh (batch and heads, batch and
sequence), no layout describes the merged axis, and the partitioner gathers. Here products, and the
sum that is the gradient of a bias, are computed on the axes as they were before they were merged.

>>> x = Matrix(jnp.ones((2, 3, 4)), False)               # 6 rows, before they were merged
>>> weight = Matrix(jnp.ones((5, 4)), True)              # a layer multiplies with its transpose
>>> merged, unmerged = product(x, weight)
>>> merged.shape, unmerged.shape
((6, 5), (2, 3, 5))
>>> gradient, unmerged = product(Matrix(jnp.ones((2, 3, 5)), True), x)
>>> gradient.shape, unmerged
((5, 4), None)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp  # noqa: F401  (for the doctest)

from isoshard.torch_bridge.engine.values.views import Chain, forward
from isoshard.torch_bridge.lowerings.argument_forms import wide, wide_dtype
from isoshard.torch_bridge.lowerings.integer_products import dot_general

from . import ordered_indices

_TURN = ("permute", (1, 0))
"""The view operation that transposes a matrix."""

_TURN_LAST = ("permute", (0, 2, 1))
_REMAKES = frozenset({"aten::clone", "aten::_unsafe_view"})


_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::sum.dim_IntList"})


def looked_through(recipe: Any, entry: Sequence[int], makers: Sequence[Any]) -> list[int]:
    """The slots that a rewrite of an entry may look at: its operands, and theirs."""
    slots = dict.fromkeys(entry[1:])
    if recipe.name in ordered_indices.READS:
        for index in entry[2:]:
            for _, producer in ordered_indices.producers(index, makers):
                slots.update(dict.fromkeys(producer[1:]))
        return [*slots]
    turns = isinstance(recipe.detail, Chain) and recipe.detail.ops == (_TURN,)
    if not turns and recipe.name not in _PRODUCTS:
        return [*slots]
    pending = list(slots)
    for slot in pending:
        maker = makers[slot]
        if maker is None:
            continue
        is_turned = turns and slot == entry[1] and maker[0].name == "aten::mm"
        if is_turned or maker[0].name in _REMAKES or isinstance(maker[0].detail, Chain):
            new = [slot for slot in maker[1][1:] if slot not in slots]
            slots.update(dict.fromkeys(new))
            pending += new
    return [*slots]


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


class MatmulOperand(NamedTuple):
    """A batched matrix as it was before its batch axes were merged.

    Attributes:
        array: of shape `(*batch, rows, columns)`, or with the last two axes swapped.
        turned: whether they are.
    """

    array: Any
    turned: bool

    @property
    def batch(self) -> tuple[int, ...]:
        """Extents of the batch axes."""
        return self.array.shape[:-2]


class Rewriter:
    """Computes some entries of a program in a cheaper way.

    Args:
        env: the value of each slot so far; filled by the interpreter.
        makers: what made each of them: recipe, entry and lifted floats, or None for an input.
        unmerged: of products the value from before its axes were merged, by slot; written, too.
    """

    def __init__(
        self,
        env: list[Any],
        makers: Sequence[Any] = (),
        unmerged: dict[int, Any] | None = None,
    ):
        """See the class."""
        self._env = env
        self.makers: list[Any] = [*makers]
        self._unmerged: dict[int, Any] = {} if unmerged is None else unmerged

    def note(self, recipe: Any, entry: Any, count: int, floats: Sequence[Any] = ()) -> None:
        """Remember what made the next `count` slots; recipe None for an input."""
        self.makers += [(recipe, entry, floats) if recipe is not None else None] * count

    def rewrite(self, recipe: Any, entry: Sequence[int]) -> list[Any] | None:
        """The results of an entry, or None to run its recipe."""
        if recipe.name == "aten::mm":
            return [self._product(entry[1], entry[2])]
        if recipe.name == "aten::addmm" and recipe.detail.plain:
            return [self._product(entry[2], entry[3], bias=self._env[entry[1]])]
        if recipe.name == "aten::sum.dim_IntList":
            return self._sum_of_rows(recipe.detail, entry[1])
        if recipe.name == "aten::bmm":
            return self._batched(entry[1], entry[2])
        if recipe.name in ordered_indices.READS:
            operands = [self._env[slot] for slot in entry[1:]]
            read = ordered_indices.ordered_read(recipe, entry, operands, self.makers)
            return None if read is None else [read]
        if isinstance(recipe.detail, Chain):
            return self._view(recipe.detail, entry[1])
        if recipe.name == "aten::_unsafe_view":
            return self._remade(recipe.detail.outs[0].size, entry[1])
        return None

    def _view(self, chain: Chain, slot: int) -> list[Any] | None:
        maker = self.makers[slot]
        if chain.ops == (_TURN,) and maker and maker[0].name == "aten::mm":
            return [product(self._matrix(maker[1][2]).turn(), self._matrix(maker[1][1]).turn())[0]]
        if chain.ops[0][0] == "reshape":
            out = self._remade(chain.ops[0][1], slot)
            if out is not None:
                value = out[0]
                for op in chain.ops[1:]:
                    value = forward(op, value, chain.base)
                return [value]
        return None

    def _remade(self, size: tuple[int, ...], slot: int) -> list[Any] | None:
        """A reshape that splits the axes which a product merged, and maybe the last one too."""
        value = self._unmerged.get(slot)
        if value is None or value.shape[:-1] != tuple(size[: value.ndim - 1]):
            return None
        return [value.reshape(size)]

    def _product(self, left: int, right: int, bias: Any = None) -> Any:
        """`mm(left, right) + bias`, reading through transposed and merged operands.

        The bias is added before the one rounding.
        """
        a, b = self._matrix(left), self._matrix(right)
        dtype = a.array.dtype
        merged, unmerged = product(a, b, None if bias is None else wide_dtype(dtype))
        if bias is not None and (unmerged is None or bias.ndim != 1):
            return (merged + wide(bias)).astype(dtype)
        if unmerged is None:
            return merged
        unmerged = unmerged if bias is None else (unmerged + wide(bias)).astype(dtype)
        self._unmerged[len(self.makers)] = unmerged
        return unmerged.reshape(merged.shape)

    def _sum_of_rows(self, call: Any, slot: int) -> list[Any] | None:
        """The gradient of a bias: one row, the sum of all that were merged into a matrix."""
        (out,) = call.outs
        if self._env[slot].ndim != 2:
            return None
        rows = self._matrix(slot)
        if rows.turned or rows.array.ndim < 3 or out.dtype != call.ins[0].dtype:
            return None
        if out.size != (1, rows.array.shape[-1]) or rows.array.shape[-1] == 1:
            return None
        return [rows.array.sum(tuple(range(rows.array.ndim - 1))).reshape(out.size)]

    def _matrix(self, slot: int) -> Matrix:
        """An operand of `mm` from before it was transposed, and before its rows were merged."""
        value = self._env[slot]
        if slot in self._unmerged and value.ndim == 2:
            return Matrix(self._unmerged[slot], False)
        maker = self.makers[slot]
        if maker is None:
            return Matrix(value, False)
        recipe, entry = maker[:2]
        if recipe.name in _REMAKES:
            source = self._env[entry[1]]
            if source.shape == value.shape:
                return self._matrix(entry[1])
            return _rows_from(source, value)
        if not isinstance(recipe.detail, Chain):
            return Matrix(value, False)
        chain = recipe.detail
        ops, turned = (chain.ops[:-1], True) if chain.ops[-1] == _TURN else (chain.ops, False)
        if not ops:
            inner = self._matrix(entry[1])
            return Matrix(inner.array, not inner.turned)
        source = self._env[entry[1]]
        for op in ops[:-1]:
            source = forward(op, source, chain.base)
        matrix = forward(ops[-1], source, chain.base)
        if ops[-1][0] == "reshape":
            matrix = _rows_from(source, matrix).array
        return Matrix(matrix, turned)

    def _batched(self, left: int, right: int) -> list[Any] | None:
        a, b = self._operand(left), self._operand(right)
        batch = max(a.batch, b.batch, key=len)
        if len(batch) < 2:
            return None
        a, b = _split(a, batch), _split(b, batch)
        count = len(batch)
        axes = tuple(range(count))
        contract = ((count if a.turned else count + 1,), (count + 1 if b.turned else count,))
        out = dot_general(a.array, b.array, (contract, (axes, axes)))
        merged = out.reshape(math.prod(batch), *out.shape[count:])
        self._unmerged[len(self.makers)] = out
        return [merged]

    def _operand(self, slot: int) -> MatmulOperand:
        """A `bmm` operand from before its batch axes were merged, if they were."""
        value = self._env[slot]
        if slot in self._unmerged:
            return MatmulOperand(self._unmerged[slot], False)
        maker = self.makers[slot]
        if maker is None:
            return MatmulOperand(value, False)
        recipe, entry = maker[:2]
        if recipe.name in _REMAKES:
            source = self._env[entry[1]]
            if source.shape == value.shape:
                return self._operand(entry[1])
            return _merged_from(source, value)
        if isinstance(recipe.detail, Chain):
            return self._chained(recipe.detail, entry[1], value)
        return MatmulOperand(value, False)

    def _chained(self, chain: Chain, slot: int, value: Any) -> MatmulOperand:
        ops, turned = chain.ops, False
        if ops[-1] == _TURN_LAST:
            ops, turned = ops[:-1], True
        if not ops:
            inner = self._operand(slot)
            return MatmulOperand(inner.array, inner.turned != turned)
        if ops[-1][0] != "reshape":
            return MatmulOperand(value, False)
        source = self._env[slot]
        for op in ops[:-1]:
            source = forward(op, source, chain.base)
        merged = _merged_from(source, source.reshape(ops[-1][1]))
        return MatmulOperand(merged.array, turned)


def _rows_from(source: Any, value: Any) -> Matrix:
    """`source` with its last axes merged, if those before them are the rows of `value`.

    Heads and their width are the columns of an attention's last layer: `(4, 16, 2, 8)`, which is
    `(64, 16)` in the product, is taken as `(4, 16, 16)`.
    """
    if source.ndim > 2 == value.ndim:
        rows, columns = value.shape
        for first in range(source.ndim - 1, 1, -1):
            if math.prod(source.shape[:first]) == rows and columns:
                return Matrix(source.reshape(*source.shape[:first], columns), False)
    return Matrix(value, False)


def _merged_from(source: Any, value: Any) -> MatmulOperand:
    """`source` if `value` is it with its batch axes merged, else `value`."""
    if source.ndim > value.ndim == 3 and source.shape[-2:] == value.shape[-2:]:
        return MatmulOperand(source, False)
    return MatmulOperand(value, False)


def _split(operand: MatmulOperand, batch: tuple[int, ...]) -> MatmulOperand:
    if operand.batch == batch:
        return operand
    array = operand.array
    return MatmulOperand(array.reshape(*batch, *array.shape[-2:]), operand.turned)
