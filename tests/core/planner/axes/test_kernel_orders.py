"""Orders in which kernels may run."""

from __future__ import annotations

import pytest

from isoshard.core.planner.axes.fused_kernels import FusedKernel
from isoshard.core.planner.axes.kernel_orders import started_early
from isoshard.core.planner.axes.local_program import LocalOp


def kernel(name, reads, writes):
    axes = (0,) if name in ("all-gather", "reduce-scatter") else ()
    op = LocalOp(name, None, tuple(reads), tuple(writes), 0.0, axes, 0)
    return FusedKernel(op, tuple(reads), tuple(writes), 0.0)


LAYERS = (
    ("dot_general", (0,), (10,)),
    ("dot_general", (10,), (11,)),
    ("all-gather", (1,), (12,)),
    ("slice", (12,), (13,)),
    ("dot_general", (11, 13), (14,)),
)
"""Inputs 0 and 1; three products, of which the last reads what is gathered."""


def order(rows, seconds):
    found = started_early(
        [kernel(*one) for one in rows], (0, 1), lambda one: seconds.get(one.op.name, 0.0)
    )
    return [one.writes[0] for one in found]


@pytest.mark.parametrize(
    ("takes", "place"), [(0.5, 1), (1.0, 1), (1.5, 0), (9.0, 0)], ids=["half", "one", "more", "all"]
)
def test_a_gather_starts_where_enough_is_computed_beside_it(takes, place):
    expected = [10, 11, 14]
    expected[place:place] = [12, 13]
    assert order(LAYERS, {"dot_general": 1.0, "all-gather": takes}) == expected


def test_they_run_one_after_the_other():
    rows = [*LAYERS[:2], ("all-gather", (1,), (12,)), ("all-gather", (0,), (13,)), LAYERS[-1]]
    rows[-1] = ("dot_general", (11, 12, 13), (14,))
    assert order(rows, {"dot_general": 1.0, "all-gather": 1.0}) == [13, 10, 12, 11, 14]


def test_what_is_computed_is_sent_when_it_is_there_and_gathers_run_before():
    rows = [
        LAYERS[0],
        ("reduce-scatter", (10,), (11,)),
        *LAYERS[2:],
    ]
    seconds = {"dot_general": 1.0, "all-gather": 0.5, "reduce-scatter": 5.0}
    assert order(rows, seconds) == [12, 13, 10, 11, 14]


def test_what_is_gathered_is_made_before_if_it_is_made_of_inputs():
    rows = list(LAYERS)
    rows[2:3] = [("convert_element_type", (1,), (20,)), ("all-gather", (20,), (12,))]
    seconds = {"dot_general": 1.0, "all-gather": 3.0}
    assert order(rows, seconds) == [20, 12, 13, 10, 11, 14]
    rows[2] = ("convert_element_type", (10,), (20,))
    assert order(rows, seconds) == [10, 11, 20, 12, 13, 14]
