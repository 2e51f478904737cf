"""Numbers that change from step to step, followed through Python arithmetic.

While a step is captured, a learning rate is not the float 0.001 but a `torch.SymFloat` whose node
remembers how it is computed. Optimizers calculate with it as they always do (`-lr`,
`lr / (1 - beta ** step)`), and what arrives at an operator is an expression that is evaluated anew
before each replay.

>>> table = Table()
>>> lr = table.symbol(lambda: 0.5, 0.5)
>>> step = -lr / 4
>>> step.node.value
-0.125
>>> table.evaluate([step])
[-0.125]

A Python branch on such a number would freeze one of its outcomes, so it raises `CaptureError`.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch


class CaptureError(RuntimeError):
    """A step does something that a replay would not repeat."""


_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "float_truediv": operator.truediv,
    "int_truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "float_pow": operator.pow,
    "pow_by_natural": operator.pow,
    "neg": operator.neg,
    "abs": abs,
    "sym_min": min,
    "sym_max": max,
    "sym_sqrt": math.sqrt,
    "sym_exp": math.exp,
    "sym_log": math.log,
    "sym_cos": math.cos,
    "sym_sin": math.sin,
    "sym_tan": math.tan,
}
_COMPARISONS: dict[str, Callable[..., bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


class Table:
    """The expressions of one captured step, in order of computation.

    Attributes:
        rows: `(function, operands)`; operands are row numbers. A symbol has no operands.
    """

    def __init__(self):
        """An empty table."""
        self._thread = threading.get_ident()
        self.rows: list[tuple[Callable[..., float], tuple[int, ...]]] = []

    def is_foreign(self) -> bool:
        """Whether another thread captures the step: to this one, its symbols are numbers."""
        return self._thread != threading.get_ident()

    def symbol(self, read: Callable[[], float], value: float) -> torch.SymFloat:
        """A number read anew before each replay.

        Args:
            read: gives its value then.
            value: its value now.
        """
        return torch.SymFloat(self._node(read, (), value))

    def _node(self, function: Callable[..., float], operands: tuple[int, ...], value: float):
        self.rows.append((function, operands))
        return Node(self, len(self.rows) - 1, value)

    def compute(self, function: Callable[..., float], nodes: Sequence[Node]) -> Node:
        """A new expression."""
        value = function(*(node.value for node in nodes))
        return self._node(function, tuple(node.row for node in nodes), value)

    def values(self) -> list[float]:
        """The present value of every expression, by row."""
        done: list[float] = []
        for function, operands in self.rows:
            done.append(function(*[done[row] for row in operands]))
        return done

    def evaluate(self, scalars: Sequence[Any]) -> list[float]:
        """The present value of each scalar: floats stay, expressions are computed."""
        done = self.values()
        return [filled(scalar, done) for scalar in scalars]


def filled(scalar: Any, values: Sequence[float]) -> Any:
    """The value of an expression among those of its table; anything else stands for itself."""
    return values[scalar.node.row] if isinstance(scalar, torch.SymFloat) else scalar


class Node:
    """What torch asks of the inside of a `SymFloat`.

    Attributes:
        table: where expressions are kept.
        row: this expression's number.
        value: its value during the capture.
    """

    def __init__(self, table: Table, row: int, value: float):
        """See the class."""
        self.table = table
        self.row = row
        self.value = value

    def is_symbolic(self) -> bool:
        """It changes between replays."""
        return True

    def is_float(self) -> bool:
        """All symbols are floats."""
        return True

    def is_int(self) -> bool:
        """All symbols are floats."""
        return False

    is_bool = is_nested_int = is_constant = has_hint = is_int

    def maybe_as_float(self) -> None:
        """No constant stands for it."""

    maybe_as_int = constant_int = constant_float = maybe_as_float

    def wrap_float(self, number: float) -> Node:
        """A constant as an expression."""
        return self.table._node(lambda: number, (), number)

    wrap_int = wrap_float

    def guard_float(self, file: str, line: int) -> float:
        """Python asked for the number itself."""
        if self.table.is_foreign():
            return float(self.value)
        raise CaptureError(_frozen(self.value, "converted to a Python float"))

    def guard_int(self, file: str, line: int) -> int:
        """Python asked for the number itself."""
        if self.table.is_foreign():
            return int(self.value)
        raise CaptureError(_frozen(self.value, "converted to a Python int"))

    def __getattr__(self, name: str) -> Any:
        """Arithmetic and comparisons, by torch's names for them."""
        if name in _OPERATORS:
            return lambda *others: self.table.compute(_OPERATORS[name], (self, *others))
        if name in _COMPARISONS:
            return lambda other: Outcome(
                _COMPARISONS[name](self.value, other.value), self.value, self.table
            )
        raise AttributeError(name)

    def str(self) -> str:
        """For messages."""
        return f"{self.value}"

    __str__ = __repr__ = _graph_repr = str


class Outcome:
    """The inside of a `SymBool`: a comparison of a changing number."""

    def __init__(self, holds: bool, value: float, table: Table):
        """Remember how the comparison came out during the capture."""
        self.holds = holds
        self.value = value
        self._table = table

    def expect_true(self, file: str, line: int) -> bool:
        """A check that raises if it fails: let it pass or fail now."""
        return self.holds

    def guard_bool(self, file: str, line: int) -> bool:
        """A Python branch."""
        if self._table.is_foreign():
            return self.holds
        raise CaptureError(_frozen(self.value, "compared in a Python condition"))

    def bool_(self) -> bool:
        """A Python branch."""
        return self.guard_bool("", 0)

    def is_symbolic(self) -> bool:
        """It may come out differently in a replay."""
        return True

    def is_bool(self) -> bool:
        """It is a bool."""
        return True

    def is_int(self) -> bool:
        """It is a bool."""
        return False

    is_float = is_nested_int = is_constant = has_hint = is_int

    def str(self) -> str:
        """For messages."""
        return f"{self.holds}"

    __str__ = __repr__ = _graph_repr = str


def present(scalar: Any) -> float:
    """The value that a lifted float has now, whether it is a number or an expression."""
    return scalar.node.value if isinstance(scalar, torch.SymFloat) else scalar


def settled(value: Any) -> Any:
    """A number of a capture in another thread as that number; anything else as it is."""
    if isinstance(value, torch.SymFloat) and isinstance(value.node, Node):
        return value.node.value if value.node.table.is_foreign() else value
    return value


def _frozen(value: float, how: str) -> str:
    from isoshard.core import metrics

    return (
        f"{metrics.user_location()}: a number that changes from step to step (now {value}) is "
        f"{how} inside a compiled step, which would freeze it. Keep it in tensor arithmetic, use "
        "the optimizer's capturable form, or leave this part out of the compiled step."
    )
