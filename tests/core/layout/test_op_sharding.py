import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isoshard.core.errors import ShardingError, SpecError, UnrepresentableError
from isoshard.core.layout.op_sharding import MAX_DEVICES, parse_op_sharding, to_op_sharding
from isoshard.core.layout.tiles import Tiles


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
    assert parse_op_sharding("{replicated metadata={a} metadata={b}}", 1, num_devices=2).blocks
    maximal = parse_op_sharding("{maximal device=3}", 1, num_devices=8)
    assert maximal == Tiles([[3]], num_devices=8)
    assert to_op_sharding(maximal, iota=True) == "{maximal device=3}"


def test_missing_rank_or_devices():
    with pytest.raises(SpecError, match="rank 1, not 2 and it is over 2 devices, not 4"):
        parse_op_sharding("{devices=[2]0,1}", 2, num_devices=4)
    text = "{replicated}"
    with pytest.raises(
        SpecError, match=r"pass the tensor's rank as ndim= and the number of all devices .*num_"
    ):
        parse_op_sharding(text)
    with pytest.raises(SpecError, match="pass the number of all devices as num_devices="):
        parse_op_sharding(text, 2)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("replicated", "must be in braces"),
        ("", "must be in braces"),
        ("{}", "at position 0: expected 'replicated'"),
        ("{replicate}", "at position 1: expected 'replicated', .* found 'replicate'"),
        ("{devices=[2,x]0,1,2,3}", "the blocks '2,x' are not integers"),
        ("{devices=[2]0,,1}", "the devices '0,,1' are not integers"),
        ("{devices=[2]<=[a]}", "the dims after '<=' 'a' are not integers"),
        ("{devices=[4]<=[2,2]T(0)}", r"the order T\(0,\) does not permute the dims \[2, 2\]"),
        ("{devices=[2]0,1 sideways}", "at position 16: expected nothing .* found 'sideways'"),
        ("{devices=[2,2]0,1}", "2,2,1 blocks do not match 2 devices"),
        ("{devices=[2]0,0}", r"\[0, 0\] are not 0\.\.1"),
        ("{devices=[2]1,2}", r"\[1, 2\] are not 0"),
        ("{devices=[-2,-4]<=[8]}", r"the blocks \[-2, -4\] are not all positive"),
        ("{devices=[4]<=[-2,-2]}", r"the dims after '<=' \[-2, -2\] are not all positive"),
        ("{devices=[4]<=[4]T(-1)}", r"T\(-1,\) does not permute"),
        ("{devices=[1_0]<=[1_0]}", "the blocks '1_0' are not integers"),
        ("{devices=[9]<=[9]}", "it is over 9 devices, not 4"),
        ("{devices=[999999999999]<=[999999999999]}", "is over 999999999999 devices, not 4"),
        ("{devices=[4,999999]<=[4,99999]}", "4,999999,1 blocks do not match 399996 devices"),
        ("{maximal device=9}", "no device 9 among 4"),
    ],
)
def test_parse_errors_name_the_part(text, what):
    with pytest.raises(SpecError, match=what):
        parse_op_sharding(text, 1, num_devices=4)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{manual}", "by hand"),
        ("{devices=[2,2]<=[4] last_tile_dims={manual}}", "by hand"),
        ("{devices=[2,2,2]<=[8] last_tile_dims={replicated, manual}}", "by hand"),
        ("{devices=[1,4,2]<=[8] last_tile_dims={unreduced, replicated}}", "a sum that was not"),
        ("{unknown}", "left to the compiler"),
        ("{{replicated}, {devices=[2]0,1}}", "tuple of layouts"),
    ],
)
def test_no_layout(text, what):
    with pytest.raises(UnrepresentableError, match=what):
        parse_op_sharding(text, 1, num_devices=4)


def test_some_devices_but_not_all_cannot_be_printed():
    with pytest.raises(UnrepresentableError, match=r"\[0, 2\] of 4 have data"):
        to_op_sharding(Tiles([[0], [2]], num_devices=4))


def test_an_order_that_is_no_count_is_written_out():
    tiles = Tiles([[0], [2], [1], [3], [5], [4]])
    assert to_op_sharding(tiles, iota=True) == to_op_sharding(tiles) == "{devices=[6]0,2,1,3,5,4}"


@settings(max_examples=40)
@given(st.permutations(range(12)), st.sampled_from([(12, 1), (3, 4), (2, 2, 3), (1, 12)]))
def test_any_order_survives_both_forms(order, shape):
    tiles = Tiles(np.array(order).reshape(shape))
    for iota in (False, True):
        text = to_op_sharding(tiles, iota=iota)
        assert parse_op_sharding(text, tiles.ndim, num_devices=12) == tiles


@settings(max_examples=40)
@given(st.permutations(range(4)), st.lists(st.integers(1, 4), min_size=4, max_size=4))
def test_every_transposed_count_is_printed_as_one(order, dims):
    devices = np.arange(np.prod(dims)).reshape(dims).transpose(order).reshape(-1, 1)
    if devices.size > 1:
        assert "<=" in to_op_sharding(Tiles(devices), iota=True)


SIZES = st.one_of(
    st.integers(-(10**20), 10**20), st.integers(-2, 10), st.sampled_from([2**31, 2**32, 2**63])
)


@st.composite
def hostile(draw):
    """A string of the right form whose numbers are any numbers, and of any length."""
    counts = ",".join(map(str, draw(st.lists(SIZES, max_size=40))))
    dims = ",".join(map(str, draw(st.lists(SIZES, max_size=40))))
    order = draw(st.none() | st.lists(st.integers(-1, 40), max_size=40))
    turned = "" if order is None else f"T({','.join(map(str, order))})"
    tail = draw(st.sampled_from(["", " last_tile_dim_replicate", " metadata={a"]))
    devices = f"<=[{dims}]{turned}" if draw(st.booleans()) else dims
    return f"{{devices=[{counts}]{devices}{tail}}}"


@settings(max_examples=40)
@given(hostile(), st.none() | st.integers(1, 8))
def test_any_numbers_are_read_or_refused_at_once(text, num_devices):
    tracemalloc.start()
    began = time.process_time()
    try:
        tiles = parse_op_sharding(text, num_devices=num_devices)
        assert num_devices in (None, tiles.num_devices)
    except SpecError as error:
        assert len(str(error)) < 2000
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 20 << 20
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{devices=[100000000]<=[100000000]}", "over 100000000 devices, and the most is 65536"),
        (f"{{devices=[{'9' * 18},{'9' * 18}]<=[{'9' * 18},{'9' * 18}]}}", r"more than 2\*\*64"),
        (f"{{devices=[{'9' * 5000}]<=[8]}}", "18 digits at most"),
        (f"{{maximal device={'9' * 5000}}}", "18 digits at most"),
        (f"{{devices=[{'1,' * 50_000}1]<=[1]}}", "the blocks are 50001, and the most is 32"),
        (f"{{devices=[1]<=[1]T({'0,' * 50_000}0)}}", "does not permute the dims"),
        ("{devices=[1]0" + " " * 50_000 + "x}", "found 'x'"),
        ("{" + "metadata={" * 50_000 + "}", "expected 'replicated'"),
        ("{" * 50_000 + "}" * 50_000, "is a tuple of layouts"),
    ],
    ids=lambda text: text[:30],
)
def test_what_asks_for_much_is_refused_at_once(text, what):
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(ShardingError, match=what) as caught:
            parse_op_sharding(text, 1, num_devices=8 if "maximal" in text else None)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert len(str(caught.value)) < 2000
    assert peak < 60 << 20
    assert time.process_time() - began < 5


def test_more_devices_than_a_string_alone_may_say():
    many = MAX_DEVICES * 2
    text = f"{{devices=[{many}]<=[{many}]}}"
    assert parse_op_sharding(text, num_devices=many).num_devices == many
