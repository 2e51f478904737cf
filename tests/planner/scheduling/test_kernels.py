"""Orders, liveness and rematerialization on kernels small enough to count by hand."""

from __future__ import annotations

import pytest

from isoshard.planner.scheduling.kernel_orders import behind_loops, breadth_first, frees_most
from isoshard.planner.scheduling.kernels import Kernel, awaited
from isoshard.planner.scheduling.liveness import live_bytes
from isoshard.planner.scheduling.rematerialization import rematerialized
from isoshard.planner.scheduling.sibling_fusion import siblings_fused

BIG = 1 << 20


def kernel(name, reads, writes, kind="other", **flags):
    return Kernel(name, tuple(reads), tuple(writes), kind, **flags)


def names(kernels):
    return [one.op for one in kernels]


class Values:
    def __init__(self, *sizes):
        self.bytes = list(sizes)

    def copy(self, value):
        self.bytes.append(self.bytes[value])
        return len(self.bytes) - 1


@pytest.mark.parametrize(("in_place", "peak"), [(True, 16), (False, 24)])
def test_a_result_is_written_over_an_operand_that_ends(in_place, peak):
    order = [
        kernel("a", [0], [1]),
        kernel("b", [1], [2], in_place=True),
        kernel("c", [2, 1], [3], in_place=in_place),
    ]
    live = live_bytes(order, [8] * 4, fixed={0}, ends={3})
    assert (live.at, live.peak) == ([8, 16, peak], max(16, peak))
    assert set(live.alive(2)) == {1, 2, 3}


def test_what_runs_inside_counts_in_addition():
    loop = kernel("loop", [1], [2], "loop", in_place=True, renewed=frozenset({2}))
    order = [kernel("a", [0], [1]), loop]
    live = live_bytes(order, [8] * 3, fixed={0}, ends={2}, inner={id(loop): 100}, extra={0: 5})
    assert (live.at, live.index) == ([13, 108], 1)
    assert live_bytes([], [], ahead=()).peak == 0


def test_products_run_behind_loops_that_do_not_need_them():
    order = [
        kernel("product", [0], [1], "product"),
        kernel("scaled", [1], [2]),
        kernel("cheap", [0], [5]),
        kernel("loop", [3], [4], "loop"),
    ]
    assert names(behind_loops(order, {2, 4})) == ["cheap", "loop", "product", "scaled"]
    order[-1] = kernel("loop", [3, 2], [4], "loop")
    assert names(behind_loops(order, {4})) == ["product", "scaled", "cheap", "loop"]


def test_ready_kernels_run_first_in_first_out_or_by_what_they_free():
    order = [kernel("a", [1], [2]), kernel("b", [0], [3]), kernel("c", [3], [4])]
    assert names(breadth_first(order, (0, 1))) == ["b", "a", "c"]
    assert names(frees_most(order, [0, 0, 9, 9, 1], {0, 1})) == ["a", "b", "c"]


def test_siblings_are_one_kernel_unless_one_needs_the_other():
    order = [
        kernel("a", [0], [1], by_element=True),
        kernel("user", [1], [2], "product"),
        kernel("b", [0], [3], by_element=True),
    ]
    fused = siblings_fused(order, [BIG] * 4, [BIG] * 4)
    assert [one.writes for one in fused] == [(1, 3), (2,)]
    order[-1] = kernel("b", [0, 2], [3], by_element=True)
    assert names(siblings_fused(order, [BIG] * 4, [BIG] * 4)) == ["a", "user", "b"]


def test_a_value_is_computed_again_where_too_much_is_alive():
    order = [
        kernel("a", [0], [1], is_fusion=True),
        kernel("first", [1], [2], "product"),
        kernel("large", [2], [3], "product"),
        kernel("last", [1, 3], [4], "product"),
    ]
    values = Values(0, 8, 1, 8, 1)
    again = rematerialized(values, order, {0, 4}, 10, {})
    assert names(again) == ["a", "first", "large", "a", "last"]
    assert live_bytes(again, values.bytes, fixed={0, 4}).at == [8, 9, 9, 16, 16]
    assert names(rematerialized(Values(0, 8, 1, 8, 1), order, {0, 4}, 99, {})) == names(order)


def test_what_depends_on_a_run_of_a_loop_waits():
    rows = [((0,), (1,), False), ((1,), (2,), True), ((2,), (3,), False)]
    assert awaited(rows, ()) == ([False, False, True], {2, 3})
    assert awaited(rows, {0})[0] == [True, True, True]
