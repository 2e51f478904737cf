"""Operations: undone exactly, and loaded rectangle by rectangle as they run."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isoshard.core.weights.joining import Concat, Split
from isoshard.core.weights.ops import Kernel, OpError, Transpose, TransposedKernel, WaitingMemory
from isoshard.core.weights.reshaping import MergeAxes, SplitAxis

CASES = [
    ([Transpose()], [(4, 6)]),
    ([Transpose((2, 0, 1))], [(2, 3, 4)]),
    ([Kernel()], [(4, 6)]),
    ([Kernel()], [(4, 3, 5, 2)]),
    ([Kernel(undo=True)], [(5, 2, 3, 4)]),
    ([TransposedKernel()], [(4, 3, 5, 2)]),
    ([TransposedKernel()], [(2, 3, 4)]),
    ([TransposedKernel(undo=True), Transpose((1, 0, 2))], [(5, 2, 3)]),
    ([SplitAxis(0, (3, -1))], [(12, 4)]),
    ([SplitAxis(1, (2, -1, 2))], [(3, 12)]),
    ([MergeAxes(0, (3, -1))], [(3, 4, 2)]),
    ([MergeAxes(1, (-1, 2, 2))], [(3, 3, 2, 2)]),
    ([Concat(0, count=3)], [(4, 3), (4, 3), (4, 3)]),
    ([Concat(1, sizes=(2, 3))], [(4, 2), (4, 3)]),
    ([Split(0, count=3)], [(12, 2)]),
    ([Split(1, sizes=(2, -1))], [(4, 7)]),
    ([Kernel(), SplitAxis(1, (3, -1))], [(12, 5)]),
    ([Kernel(), SplitAxis(0, (3, -1))], [(5, 12)]),
    ([SplitAxis(0, (3, -1)), Transpose((2, 0, 1))], [(12, 5)]),
    ([SplitAxis(0, (3, -1)), Transpose((1, 2, 0))], [(12, 5)]),
    ([Concat(0, count=2), Kernel(), SplitAxis(1, (2, 3, -1))], [(6, 4), (6, 4)]),
    ([Kernel(), Split(1, count=3), SplitAxis(1, (2, -1))], [(12, 4)]),
]


def run(ops, arrays):
    for op in ops:
        arrays = op.run(arrays, np)
    return arrays


def arrays_of(shapes):
    count = itertools.count()
    return [
        np.fromiter(count, np.int64, int(np.prod(shape))).reshape(shape)
        + 0  # count goes on from array to array
        for shape in shapes
    ]


@pytest.mark.parametrize(("ops", "shapes"), CASES)
def test_the_inverse_undoes_and_shapes_are_those_of_the_results(ops, shapes):
    before = arrays = arrays_of(shapes)
    for op in ops:
        expected = op.shapes([array.shape for array in arrays])
        arrays = op.run(arrays, np)
        assert [array.shape for array in arrays] == expected
    back = run([op.inverse for op in reversed(ops)], arrays)
    for one, other in zip(before, back, strict=True):
        np.testing.assert_array_equal(one, other)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_rectangle_is_loaded_as_it_is_computed(data):
    ops, shapes = data.draw(st.sampled_from(CASES))
    arrays = arrays_of(shapes)
    steps = [shapes]
    for op in ops:
        steps.append(op.shapes(steps[-1]))
    results = run(ops, arrays)
    which = data.draw(st.integers(0, len(results) - 1))
    index = []
    for size in results[which].shape:
        low = data.draw(st.integers(0, size - 1))
        index.append(slice(low, data.draw(st.integers(low + 1, size))))
    expected = results[which][tuple(index)]
    memory = np.full(expected.shape, -1)
    pieces = [WaitingMemory(which, tuple(part.start for part in index), memory)]
    for op, before in zip(reversed(ops), reversed(steps[:-1]), strict=True):
        pieces = op.back(pieces, before)
    for piece in pieces:
        ends = zip(piece.start, piece.view.shape, strict=True)
        piece.view[...] = arrays[piece.which][tuple(slice(a, a + n) for a, n in ends)]
    np.testing.assert_array_equal(memory, expected)


def test_every_run_of_merged_axes_is_loaded_as_it_is_computed():
    op, array = MergeAxes(0, (3, 4)), np.arange(24).reshape(3, 4, 2)
    for start, stop in itertools.combinations(range(13), 2):
        memory = np.full((stop - start, 2), -1)
        for piece in op.back([WaitingMemory(0, (start, 0), memory)], [(3, 4, 2)]):
            ends = zip(piece.start, piece.view.shape, strict=True)
            piece.view[...] = array[tuple(slice(a, a + n) for a, n in ends)]
        np.testing.assert_array_equal(memory, array.reshape(12, 2)[start:stop])


@pytest.mark.parametrize(
    ("op", "shapes", "why"),
    [
        (Kernel(), [(3,)], "rank 2 to 5, not 1"),
        (TransposedKernel(), [(3, 4)], "rank 3 to 5, not 2"),
        (Transpose(), [(2, 3, 4)], "does not fit rank 3"),
        (SplitAxis(0, (5, -1)), [(12,)], "does not divide size 12"),
        (SplitAxis(2, (5, -1)), [(12,)], "does not fit rank 1"),
        (MergeAxes(0, (2, -1)), [(3, 4)], r"does not fit \(3, 4\)"),
        (Concat(0), [(4, 3), (4, 2)], "does not fit shapes"),
        (Concat(0), [(4, 3), (5, 3)], "does not fit shapes"),
        (Split(0, count=5), [(12,)], "does not divide axis 0"),
        (Split(1, count=2), [(12,)], "does not fit rank 1"),
    ],
)
def test_a_shape_that_does_not_fit(op, shapes, why):
    with pytest.raises(OpError, match=why):
        op.shapes(shapes)


SIZES = {"x": 2, "y": 4}


@pytest.mark.parametrize(
    ("op", "layouts", "shapes", "found"),
    [
        (Kernel(), [(("x",), ("y",))], [(4, 8)], [(("y",), ("x",))]),
        (TransposedKernel(), [(("x",), ("y",), ())], [(4, 8, 3)], [((), ("x",), ("y",))]),
        (SplitAxis(0, (4, -1)), [(("y",), ())], [(8, 2)], [(("y",), (), ())]),
        (SplitAxis(0, (2, -1)), [(("x", "y"),)], [(8,)], [(("x",), ("y",))]),
        (MergeAxes(0, (4, -1)), [(("y",), ("x",))], [(4, 8)], [(("y", "x"),)]),
        (MergeAxes(0, (4, -1)), [(("x",), ())], [(4, 8)], [(("x",),)]),
        (Concat(0), [((), ("x",))] * 2, [(4, 8)] * 2, [((), ("x",))]),
        (Split(0, count=2), [((), ("x",))], [(4, 8)], [((), ("x",))] * 2),
    ],
)
def test_the_layout_follows(op, layouts, shapes, found):
    assert op.layouts(layouts, shapes, SIZES) == found


@pytest.mark.parametrize(
    ("op", "layouts", "shapes", "why"),
    [
        (TransposedKernel(), [((), (), ("x",))], [(4, 8, 2)], "move data: axis 2 is split"),
        (SplitAxis(0, (2, -1)), [(("y",),)], [(8,)], "would split the blocks"),
        (MergeAxes(0, (4, -1)), [((), ("x",))], [(4, 8)], "side by side"),
        (Concat(0), [(("x",),)] * 2, [(4,)] * 2, "would move data: axis 0 is split"),
        (Concat(0), [(("x",),), ((),)], [(4,)] * 2, "sharded differently"),
        (Concat(0), [((), ("x",)), ((), ())], [(4, 2)] * 2, "sharded differently"),
        (Split(0, count=2), [(("x",),)], [(4,)], "would move data"),
    ],
)
def test_a_layout_that_would_move_data(op, layouts, shapes, why):
    with pytest.raises(OpError, match=why):
        op.layouts(layouts, shapes, SIZES)
