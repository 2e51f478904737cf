import math
import re

import jax
import numpy as np
import pytest

from isoshard.core.domain.blocks.packing import pack
from isoshard.core.domain.windows.conv import conv
from isoshard.core.domain.windows.pool import max_pool
from isoshard.core.domain.windows.resize import interpolate
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.transfer.place import shard

from .traffic import compiled

_SHAPE = re.compile(r"= \w+\[([\d,]+)\]")


def _passes(program, elements):
    """How many instructions make something as large, each of which goes over memory once."""
    lines = program[program.index("\nENTRY") :].splitlines()
    shapes = [found[1] for line in lines if (found := _SHAPE.search(line))]
    return sum(math.prod(map(int, shape.split(","))) >= elements for shape in shapes)


@pytest.mark.parametrize("strided", [False, True])
def test_windows_of_unequal_blocks_take_no_more_passes_than_those_of_equal_ones(strided):
    sizes = (25, 39, 23, 41)

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
