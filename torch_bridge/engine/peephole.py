"""Rewrites of the tape that XLA does not find by itself.

torch's autograd computes the gradient of a weight as `t(mm(t(x), g))`. XLA for CPU keeps those
transposes and the copies they cost; a dot product with other contraction axes needs none.

torch's `matmul` merges all batch axes into one before it calls `bmm`. If two of them are split over
the mesh (batch and heads), no layout describes the merged axis, and the partitioner gathers. Here
`bmm` is computed on the axes as they were before they were merged.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from .views import Chain, forward

_TURN = ("permute", (1, 0))
_TURN_LAST = ("permute", (0, 2, 1))
_REMAKES = frozenset({"aten::clone", "aten::_unsafe_view"})


class Operand(NamedTuple):
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
    """

    def __init__(self, env: list[Any]):
        """See the class."""
        self._env = env
        self._makers: list[Any] = []
        self._unmerged: dict[int, Any] = {}

    def note(self, recipe: Any, entry: Any, count: int) -> None:
        """Remember what made the next `count` slots; recipe None for an input."""
        self._makers += [(recipe, entry) if recipe is not None else None] * count

    def rewrite(self, recipe: Any, entry: tuple[int, ...]) -> list[Any] | None:
        """The results of an entry, or None to run its recipe."""
        if recipe.name == "aten::mm":
            return [self._dot(entry[1], entry[2])]
        if recipe.name == "aten::bmm":
            return self._batched(entry[1], entry[2])
        if isinstance(recipe.detail, Chain):
            return self._view(recipe.detail, entry[1])
        if recipe.name == "aten::_unsafe_view":
            return self._remade(recipe.detail.outs[0].size, entry[1])
        return None

    def _view(self, chain: Chain, slot: int) -> list[Any] | None:
        made = self._makers[slot]
        if chain.ops == (_TURN,) and made and made[0].name == "aten::mm":
            return [self._dot(made[1][1], made[1][2], turned=True)]
        if chain.ops[0][0] == "reshape":
            got = self._remade(chain.ops[0][1], slot)
            if got is not None:
                value = got[0]
                for op in chain.ops[1:]:
                    value = forward(op, value, chain.base)
                return [value]
        return None

    def _remade(self, size: tuple[int, ...], slot: int) -> list[Any] | None:
        """A reshape that splits the batch axes which `bmm` merged."""
        value = self._unmerged.get(slot)
        return [value] if value is not None and value.shape == tuple(size) else None

    def _dot(self, left: int, right: int, *, turned: bool = False) -> Any:
        """`mm(left, right)`, or its transpose, reading through transposed operands."""
        a, a_axis = self._through(left, 1)
        b, b_axis = self._through(right, 0)
        if turned:
            a, a_axis, b, b_axis = b, b_axis, a, a_axis
        return jax.lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())))

    def _through(self, slot: int, axis: int) -> tuple[Any, int]:
        """An operand and its contraction axis, taken from before a transpose if there is one."""
        made = self._makers[slot]
        if made and isinstance(made[0].detail, Chain) and made[0].detail.ops == (_TURN,):
            return self._env[made[1][1]], 1 - axis
        return self._env[slot], axis

    def _batched(self, left: int, right: int) -> list[Any] | None:
        a, b = self._operand(left), self._operand(right)
        batch = max(a.batch, b.batch, key=len)
        if len(batch) < 2:
            return None
        a, b = _split(a, batch), _split(b, batch)
        count = len(batch)
        axes = tuple(range(count))
        contract = ((count if a.turned else count + 1,), (count + 1 if b.turned else count,))
        got = jax.lax.dot_general(a.array, b.array, (contract, (axes, axes)))
        merged = got.reshape(math.prod(batch), *got.shape[count:])
        self._unmerged[len(self._makers)] = got
        return [merged]

    def _operand(self, slot: int) -> Operand:
        """A `bmm` operand from before its batch axes were merged, if they were."""
        value = self._env[slot]
        if slot in self._unmerged:
            return Operand(self._unmerged[slot], False)
        made = self._makers[slot]
        if made is None:
            return Operand(value, False)
        recipe, entry = made
        if recipe.name in _REMAKES:
            source = self._env[entry[1]]
            if source.shape == value.shape:
                return self._operand(entry[1])
            return _merged_from(source, value)
        if isinstance(recipe.detail, Chain):
            return self._chained(recipe.detail, entry[1], value)
        return Operand(value, False)

    def _chained(self, chain: Chain, slot: int, value: Any) -> Operand:
        ops, turned = chain.ops, False
        if ops[-1] == _TURN_LAST:
            ops, turned = ops[:-1], True
        if not ops:
            inner = self._operand(slot)
            return Operand(inner.array, inner.turned != turned)
        if ops[-1][0] != "reshape":
            return Operand(value, False)
        source = self._env[slot]
        for op in ops[:-1]:
            source = forward(op, source, chain.base)
        found = _merged_from(source, source.reshape(ops[-1][1]))
        return Operand(found.array, turned)


def _merged_from(source: Any, value: Any) -> Operand:
    """`source` if `value` is it with its batch axes merged, else `value`."""
    if source.ndim > value.ndim == 3 and source.shape[-2:] == value.shape[-2:]:
        return Operand(source, False)
    return Operand(value, False)


def _split(operand: Operand, batch: tuple[int, ...]) -> Operand:
    if operand.batch == batch:
        return operand
    array = operand.array
    return Operand(array.reshape(*batch, *array.shape[-2:]), operand.turned)
