import math
import re

import jax
import numpy as np
import pytest

from isoshard.core.domain.blocks.packing import pack
from isoshard.core.domain.blocks.row_windows import Core, plan_windows, reflected
from isoshard.core.domain.windows.conv import conv
from isoshard.core.domain.windows.pool import max_pool
from isoshard.core.domain.windows.resize import interpolate
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.transfer.place import shard

from .traffic import compiled

_SHAPE = re.compile(r"= \w+\[([\d,]+)\]")


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


@pytest.mark.parametrize(
    ("starts", "core"),
    [((-1, 4, 11), Core(1, 1, 6, 0)), ((-1, 3, 11), Core(1, 2, 6, None)), ((0, 0, 0), None)],
)
def test_rows_that_stay_on_every_device_are_the_core(starts, core):
    needs = (7, 8, 6) if core else (5, 5, 5)  # the last ones are the first shard's, everywhere
    assert plan_windows((5, 7, 5), starts, needs).core == core


def _passes(program, elements):
    """How many instructions make something as large, each of which goes over memory once."""
    lines = program[program.index("\nENTRY") :].splitlines()
    shapes = [found[1] for line in lines if (found := _SHAPE.search(line))]
    return sum(math.prod(map(int, shape.split(","))) >= elements for shape in shapes)


@pytest.mark.parametrize("sizes", [(24, 40, 24, 40), (25, 39, 23, 41)])
@pytest.mark.parametrize("strided", [False, True])
def test_windows_of_unequal_blocks_take_no_more_passes_than_those_of_equal_ones(sizes, strided):
    def convolve(x, w):
        return conv(x, w, stride=1 + strided, padding=1, method="windows", mesh=mesh, spec=spec)

    def pooled(x):
        return max_pool(x, 3, stride=1 + strided, padding=1, method="windows", mesh=mesh, spec=spec)

    mesh, spec = make_mesh((4,), ("x",)), (None, None, "x")
    field = np.ones((1, 4, 128, 64), np.float32)
    w = shard(np.ones((4, 4, 3, 3), np.float32), mesh, None)
    even, uneven = shard(field, mesh, spec), pack(field, mesh, spec, sizes)
    block = 4 * 24 * 64 // (4 if strided else 1)  # elements, of the input or less
    for function, operands in ((convolve, (w,)), (pooled, ())):
        one, other = (_passes(compiled(function, x, *operands), block) for x in (even, uneven))
        assert other <= one + (function is pooled)  # padding of the result is cleared: one more


def test_what_goes_back_into_a_window_is_computed_once():
    def total(x):
        return (interpolate(x, scale=2, mode="linear", mesh=mesh, spec=spec) ** 2).sum()

    mesh, spec = make_mesh((4,), ("x",)), (None, None, "x")
    x = shard(np.ones((1, 4, 128, 64), np.float32), mesh, spec)
    assert _passes(compiled(jax.grad(total), x), x.size // 4) < 10  # 16 if once for each piece
