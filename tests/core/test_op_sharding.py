import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isoshard.core.errors import SpecError, UnrepresentableError
from isoshard.core.op_sharding import parse_op_sharding, to_op_sharding
from isoshard.core.tiles import Tiles


@pytest.mark.parametrize(
    ("text", "grid"),
    [
        ("{devices=[4]0,1,2,3}", [[0], [1], [2], [3]]),
        ("{devices=[2,2]3,1,2,0}", [[[3], [1]], [[2], [0]]]),
        ("{devices=[2,2]<=[4]}", [[[0], [1]], [[2], [3]]]),
        ("{devices=[4]<=[2,2]T(1,0)}", [[0], [2], [1], [3]]),
        ("{devices=[2,2]<=[4] last_tile_dim_replicate}", [[0, 1], [2, 3]]),
        ("{devices=[2,2]<=[4] last_tile_dims={replicated}}", [[0, 1], [2, 3]]),
        ("  { devices=[2, 2] 0, 1, 2, 3  last_tile_dim_replicate } ", [[0, 1], [2, 3]]),
        ('{devices=[2]0,1 metadata={op_name="a"}}', [[0], [1]]),
    ],
)
def test_parse(text, grid):
    assert parse_op_sharding(text) == Tiles(grid)


def test_forms_that_need_rank_and_devices():
    assert parse_op_sharding("{replicated}", 2, num_devices=4) == Tiles.replicated(2, 4)
    assert parse_op_sharding("{replicated}", 0, num_devices=1) == Tiles([0])
    maximal = parse_op_sharding("{maximal device=3}", 1, num_devices=8)
    assert maximal == Tiles([[3]], num_devices=8)
    assert to_op_sharding(maximal, iota=True) == "{maximal device=3}"


@pytest.mark.parametrize("text", ["{replicated}", "{maximal device=0}"])
def test_missing_rank_or_devices(text):
    with pytest.raises(SpecError, match=r"pass the tensor's rank as ndim= and the devices .*num_"):
        parse_op_sharding(text)
    with pytest.raises(SpecError, match="pass the devices in all as num_devices="):
        parse_op_sharding(text, 2)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("replicated", "must stand in braces"),
        ("", "must stand in braces"),
        ("{}", "at position 0: expected 'replicated'"),
        ("{replicate}", "at position 1: expected 'replicated', .* found 'replicate'"),
        ("{devices=2,2]0,1,2,3}", "at position 1"),
        ("{devices=[2,x]0,1,2,3}", "the blocks '2,x' are no numbers"),
        ("{devices=[]0}", "the blocks '' are no numbers"),
        ("{devices=[2]0,,1}", "the devices '0,,1' are no numbers"),
        ("{devices=[2]<=[a]}", "the dims after '<=' 'a' are no numbers"),
        ("{devices=[4]<=[2,2]T(0)}", r"the order T\(0,\) does not permute the dims \[2, 2\]"),
        ("{devices=[4]<=[2,2]T(0,0)}", "does not permute"),
        ("{devices=[2]0,1 sideways}", "at position 16: expected nothing .* found 'sideways'"),
        ("{devices=[2,2]0,1}", "2,2,1 blocks do not hold 2 devices"),
        ("{devices=[2]0,0}", r"\[0, 0\] are not the numbers 0\.\.1"),
        ("{devices=[2]1,2}", r"\[1, 2\] are not the numbers"),
        ("{devices=[-2]0,1}", "blocks"),
        ("{maximal device=9}", "no device 9 among 4"),
    ],
)
def test_parse_errors_name_the_part(text, what):
    with pytest.raises(SpecError, match=what):
        parse_op_sharding(text, 1, num_devices=4)


def test_another_rank_and_number_of_devices():
    with pytest.raises(SpecError, match="rank 1, not 2 and it is over 2 devices, not 4"):
        parse_op_sharding("{devices=[2]0,1}", 2, num_devices=4)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{manual}", "by hand"),
        ("{devices=[2,2]<=[4] last_tile_dims={manual}}", "by hand"),
        ("{unknown}", "left to the compiler"),
        ("{{replicated}, {devices=[2]0,1}}", "tuple of layouts"),
    ],
)
def test_no_layout(text, what):
    with pytest.raises(UnrepresentableError, match=what):
        parse_op_sharding(text, 1, num_devices=4)


def test_some_devices_but_not_all_cannot_be_printed():
    with pytest.raises(UnrepresentableError, match=r"\[0, 2\] of 4 hold data"):
        to_op_sharding(Tiles([[0], [2]], num_devices=4))


def test_an_order_that_is_no_count_is_written_out():
    tiles = Tiles([[0], [2], [1], [3], [5], [4]])
    assert to_op_sharding(tiles, iota=True) == to_op_sharding(tiles) == "{devices=[6]0,2,1,3,5,4}"


@given(st.permutations(range(12)), st.sampled_from([(12, 1), (3, 4), (2, 2, 3), (1, 12)]))
def test_any_order_survives_both_forms(order, shape):
    tiles = Tiles(np.array(order).reshape(shape))
    for iota in (False, True):
        text = to_op_sharding(tiles, iota=iota)
        assert parse_op_sharding(text, tiles.ndim, num_devices=12) == tiles


@given(st.permutations(range(4)), st.lists(st.integers(1, 4), min_size=4, max_size=4))
def test_every_transposed_count_is_printed_as_one(order, dims):
    devices = np.arange(np.prod(dims)).reshape(dims).transpose(order).reshape(-1, 1)
    if devices.size > 1:
        assert "<=" in to_op_sharding(Tiles(devices), iota=True)
