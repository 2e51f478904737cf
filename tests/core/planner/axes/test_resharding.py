"""Collectives from one layout to another."""

import pytest

from isoshard.core.planner.axes.resharding import LayoutExchange, moves, shard_shape

MESH = (4, 2)
SHAPE = (16, 8)
WHOLE = 16 * 8 * 4


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (((0,), ()), ((0,), ()), ()),
        (((), ()), ((0,), (1,)), ()),
        (((0,), ()), ((), ()), (LayoutExchange("all-gather", (0,), WHOLE),)),
        (((0,), (1,)), ((), (1,)), (LayoutExchange("all-gather", (0,), WHOLE // 2),)),
        (((0,), (1,)), ((0,), ()), (LayoutExchange("all-gather", (1,), WHOLE // 4, inner=True),)),
        (((0, 1), ()), ((), ()), (LayoutExchange("all-gather", (0, 1), WHOLE),)),
        (((0,), ()), ((), (0,)), (LayoutExchange("all-to-all", (0,), WHOLE // 4),)),
        (((0, 1), ()), ((1, 0), ()), (LayoutExchange("collective-permute", (1, 0), WHOLE // 8),)),
        (((0,), ()), ((1,), ()), None),
    ],
)
def test_moves(before, after, expected):
    found, end = moves(before, after, SHAPE, 4, MESH)
    if expected is not None:
        assert found == expected
    rows, columns = shard_shape(SHAPE, after, MESH)
    assert end == rows * columns * 4


def test_an_axis_that_does_not_divide_counts_as_its_largest_block():
    assert shard_shape((10, 3), ((0,), (1,)), MESH) == (3, 2)


def test_parts_of_an_inner_axis_lie_apart_unless_there_is_one_row():
    (found,), _ = moves(((0, 1), (2,)), ((0, 1), ()), (8, 4), 4, (4, 2, 2))
    assert found == LayoutExchange("all-gather", (2,), 4 * 4)
