import numpy as np
import pytest

from isoshard.core.domain.windows import plan_windows, reflected


@pytest.mark.parametrize("mode", ["edge", "wrap", "reflect", "symmetric"])
@pytest.mark.parametrize("total", [1, 2, 5])
def test_rows_stand_for_others_as_in_numpy(mode, total):
    padded = np.pad(np.arange(total), 12, mode)
    np.testing.assert_array_equal(reflected(np.arange(-12, total + 12), total, mode), padded)


def test_even_shards_put_pieces_side_by_side():
    plan = plan_windows((4, 4, 4), (-1, 3, 7), (6, 6, 6))
    assert [move.place for move in plan.moves] == [0, 1, 5]
    assert [move.pairs for move in plan.moves] == [
        ((0, 1), (1, 2)),
        ((0, 0), (1, 1), (2, 2)),
        ((1, 0), (2, 1)),
    ]


def test_a_wide_window_comes_from_several_shards():
    plan = plan_windows((1, 1, 1, 1), (0, 0, 0, 0), (4, 4, 4, 4))
    assert [move.hop for move in plan.moves] == [-3, -2, -1, 0, 1, 2, 3]
    assert plan.rows_received == 6


def test_empty_shards_send_nothing():
    plan = plan_windows((0, 3, 0, 3), (0, 0, 0, 2), (0, 4, 0, 4))
    assert {pair for move in plan.moves for pair in move.pairs} == {(1, 1), (3, 3), (1, 3), (3, 1)}


def test_windows_that_read_nothing_move_nothing():
    plan = plan_windows((2, 2), (-5, 9), (3, 3))
    assert plan.moves == ()
    assert plan.width == 3
