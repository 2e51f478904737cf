"""Products: zeros for padding on both sides, so that no gradient of a weight reads any."""

from __future__ import annotations

from isoshard.core.blocks.block_values import Value, joint
from isoshard.core.blocks.interpreting import bind, rule
from isoshard.core.runtime._jax_internals.jaxpr_classes import JaxprEqn


@rule("dot_general")
def product(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Matrix products of any axes."""
    left, right = values
    (left_sum, right_sum), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    left_dims, right_dims = (*left_batch, *left_sum), (*right_batch, *right_sum)
    for a, b in zip(left_dims, right_dims, strict=True):
        split = left.splits[a] or right.splits[b]
        if split is not None:
            left, right = left.packed(a, split), right.packed(b, split)
    order = [(0, axis) for axis in left_batch]
    for side, value, bound in ((0, left, left_dims), (1, right, right_dims)):
        order += [(side, axis) for axis in range(len(value.splits)) if axis not in bound]
    splits = joint([[(left, right)[side].splits[axis]] for side, axis in order])
    lost = [place for place, split in zip(order, splits, strict=True) if split is None]
    left = left.whole([axis for side, axis in lost if side == 0])
    right = right.whole([axis for side, axis in lost if side == 1])
    left, right = left.with_zeros(), right.with_zeros()
    (array,) = bind(eqn, [left.array, right.array])
    hints = [(left, right)[side].hints[axis] for side, axis in order]
    for at, (a, b) in enumerate(zip(left_batch, right_batch, strict=True)):
        hints[at] = left.hints[a] or right.hints[b]
    return [Value(array, splits, hints=tuple(hints)).with_zeros()]
