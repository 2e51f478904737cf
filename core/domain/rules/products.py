"""Products: zeros for padding on both sides, so that no gradient of a weight reads any."""

from __future__ import annotations

from jax.extend.core import JaxprEqn

from ..interpreting import bind, pack_like, rule, run_whole
from ..splits import Split
from ..values import Value, joint


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
    return [Value(array, splits).with_zeros()]


@rule("conv_general_dilated")
def convolution(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Convolutions: in blocks along the batch; along other axes at the true shape."""
    image, kernel = values
    numbers = eqn.params["dimension_numbers"]
    batch, out = numbers.lhs_spec[0], numbers.out_spec
    kernel = kernel.whole()
    inner = image.whole([axis for axis in range(len(image.splits)) if axis != batch])
    if eqn.params["batch_group_count"] != 1:
        inner = inner.whole()
    if inner.uneven:
        inner = inner.with_zeros()
        (array,) = bind(eqn, [inner.array, kernel.array])
        splits: list[Split | None] = [None] * len(out)
        splits[out[0]] = inner.splits[batch]
        found = [Value(array, tuple(splits)).with_zeros()]
    else:
        found = run_whole(eqn, [inner, kernel])
    like: list[Split | None] = [None] * len(out)
    for spatial in range(2, len(out)):
        like[out[spatial]] = image.splits[numbers.lhs_spec[spatial]]
    return pack_like(found, like)
