"""Rewrites of the tape that XLA does not find by itself.

torch's autograd computes the gradient of a weight as `t(mm(t(x), g))`. XLA for CPU keeps those
transposes and the copies they cost; a dot product with other contraction axes needs none.
"""

from __future__ import annotations

from typing import Any

import jax

from isoshard.torch_bridge.engine.views import Chain

_TURN = ("permute", (1, 0))


def rewrite(recipe: Any, entry: tuple[int, ...], env: list[Any], makers: list[Any]) -> Any:
    """The results of an entry in a cheaper way, or None to run its recipe.

    Args:
        recipe: the entry's recipe.
        entry: recipe number and input slots.
        env: the value of each slot so far.
        makers: `(recipe, entry)` that made each slot; None for an input.
    """
    if recipe.name == "aten::mm":
        return [_dot(entry[1], entry[2], env, makers)]
    if _is_turn(recipe):
        made = makers[entry[1]]
        if made and made[0].name == "aten::mm":
            return [_dot(made[1][1], made[1][2], env, makers, turned=True)]
    return None


def _is_turn(recipe: Any) -> bool:
    return isinstance(recipe.detail, Chain) and recipe.detail.ops == (_TURN,)


def _dot(left: int, right: int, env: list[Any], makers: list[Any], *, turned: bool = False) -> Any:
    """`mm(left, right)`, or its transpose, reading through transposed operands."""
    a, a_axis = _through(left, 1, env, makers)
    b, b_axis = _through(right, 0, env, makers)
    if turned:
        a, a_axis, b, b_axis = b, b_axis, a, a_axis
    return jax.lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())))


def _through(slot: int, axis: int, env: list[Any], makers: list[Any]) -> tuple[Any, int]:
    """An operand and its contraction axis, taken from before a transpose if there is one."""
    made = makers[slot]
    if made and _is_turn(made[0]) and made[0].detail.size == env[slot].shape:
        source = env[made[1][1]]
        if source.ndim == 2:
            return source, 1 - axis
    return env[slot], axis
