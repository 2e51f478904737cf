"""Packing and unpacking one axis: transposes of each other, and neither reads padding."""

import jax
import numpy as np
import pytest

from isoshard.core.domain.blocks.splits import AxisSplit, pack_axis, unpack_axis, valid_mask


@pytest.mark.parametrize(
    ("sizes", "ends"),
    [((3, 3, 1, 0), True), ((1, 0, 3, 2), False), ((2, 2), True), ((0, 0), True), ((0, 2), False)],
)
def test_out_and_in_again(sizes, ends):
    split = AxisSplit(sizes, max(sizes))
    x = np.arange(2.0 * split.extent, dtype=np.float32).reshape(2, split.extent)
    packed = pack_axis(x, 1, split)
    assert split.ends == ends and packed.shape == (2, split.padded)
    np.testing.assert_array_equal(packed[:, split.places()], x)
    assert not np.delete(packed, split.places(), 1).any()
    np.testing.assert_array_equal(unpack_axis(packed, 1, split), x)
    poisoned = np.where(split.valid(), packed, np.nan)
    np.testing.assert_array_equal(unpack_axis(poisoned, 1, split), x)
    (back,) = jax.linear_transpose(lambda x: pack_axis(x, 1, split), x)(poisoned)
    np.testing.assert_array_equal(back, x)


def test_a_full_axis_needs_no_mask():
    assert valid_mask([AxisSplit((2, 2), 2), None]) is None
    assert valid_mask([AxisSplit((2, 1), 2), None]).tolist() == [[True], [True], [True], [False]]
