"""torch's operators over functions: `torch.cond`, `while_loop`, `scan` and `map`.

>>> COND.resolve().name()
'cond'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .declared import NAMES

_WITHOUT = "it raises for tensors on the device"

DYNAMO = "torch._dynamo"
"""The module that torch imports when it traces something for the first time."""

while_loop: Callable[..., Any] = NAMES.bind(
    "torch._higher_order_ops.while_loop.while_loop",
    why="is a loop whose number of steps depends on values",
    without="`torch_xla.experimental.fori_loop` raises",
)

FOLLOWED = NAMES.state(
    "torch._dynamo.dont_skip_tracing",
    why="lets dynamo follow functions of isoshard",
    without="`torch_xla.experimental.fori_loop` raises",
)

COND = NAMES.state(
    "torch._higher_order_ops.cond.cond_op",
    why="is what `torch.cond` calls with the graphs of both branches",
    without=_WITHOUT,
)

WHILE = NAMES.state(
    "torch._higher_order_ops.while_loop.while_loop_op",
    why="is what `while_loop` calls with the graphs of condition and body",
    without=_WITHOUT,
)

STACKED_WHILE = NAMES.state(
    "torch._higher_order_ops.while_loop.while_loop_stack_output_op",
    why="is what `while_loop` calls where it keeps all steps for a gradient",
    without=_WITHOUT,
)

SCAN = NAMES.state(
    "torch._higher_order_ops.scan.scan_op",
    why="is what `scan` of `torch._higher_order_ops` calls with the graph of a step",
    without=_WITHOUT,
)

MAP = NAMES.state(
    "torch._higher_order_ops.map.map_impl",
    why="is what `map` of `torch._higher_order_ops` calls with the graph of a step",
    without=_WITHOUT,
)


def is_control_flow(function: Any) -> bool:
    """Whether a function is one of these operators."""
    if not hasattr(function, "py_kernels"):
        return False  # nearly always
    return any(function is row.resolve(None) for row in (COND, WHILE, STACKED_WHILE, SCAN, MAP))
