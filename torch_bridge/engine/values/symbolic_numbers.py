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

import builtins
import functools
import math
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from isoshard.core.errors import CaptureError
from isoshard.core.runtime import metrics

from .expressions import Listed, Present, Rows, taking

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
_OF_INTS = (
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.pow),
    *(operator.neg, abs, min, max),
)
"""Whose result for Python's ints is an int."""
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

    Equal expressions of the same operands are one row. Rows are evaluated by `Rows`.

    Attributes:
        rows: `(function, operands)`; operands are row numbers. A symbol has no operands, nor has a
            constant, whose function is the constant itself.
    """

    def __init__(self):
        """An empty table."""
        self._thread = threading.get_ident()
        self.rows: list[tuple[Any, tuple[int, ...]]] = []
        self._indices: dict[Any, int] = {}
        self._arranged: Rows | None = None

    def is_foreign(self) -> bool:
        """Whether another thread captures the step: to this one, its symbols are numbers."""
        return self._thread != threading.get_ident()

    def symbol(
        self, read: Callable[[], float], value: float, *, is_integer: bool = False
    ) -> torch.SymFloat:
        """A number read anew before each replay; see `SymbolicNode` for `is_integer`."""
        self.rows.append((read, ()))
        return torch.SymFloat(SymbolicNode(self, len(self.rows) - 1, value, is_integer=is_integer))

    def constant(self, index: Any) -> int:
        """The row of a constant."""
        return self._row(index, (), (type(index), repr(index)))

    def compute(
        self, function: Callable[..., float], nodes: Sequence[SymbolicNode]
    ) -> SymbolicNode:
        """An expression; one that is there already, if it is."""
        value = function(*[node.value for node in nodes])
        operands = tuple([node.row for node in nodes])
        row = self._row(function, operands, (function, operands))
        is_integer = function in _OF_INTS and all(node.is_integer for node in nodes)
        return SymbolicNode(self, row, value, is_integer=is_integer)

    def _row(self, function: Any, operands: tuple[int, ...], key: Any) -> int:
        row = self._indices.get(key)
        if row is None:
            row = self._indices[key] = len(self.rows)
            self.rows.append((function, operands))
        return row

    def row_of(self, scalar: Any) -> int:
        """The row of a scalar: of an expression, or of a constant."""
        return scalar.node.row if isinstance(scalar, torch.SymFloat) else self.constant(scalar)

    def equal_rows(self, scalars: Sequence[Any]) -> list[int]:
        """A row for each scalar: those of one row are equal as long as the step counts are."""
        indices = [self.row_of(scalar) for scalar in scalars]  # a new row for a new constant
        first: dict[Any, int] = {}
        rows: list[int] = []
        for row, (function, operands) in enumerate(self.rows):
            key: Any = row
            if operands:
                key = (function, *[rows[operand] for operand in operands])
            elif isinstance(function, Listed):  # the step counts of an optimizer
                key = (id(function.numbers), repr(function()))
            rows.append(first.setdefault(key, row))
        return [rows[row] for row in indices]

    def values(self) -> Present:
        """The present value of every expression."""
        if self._arranged is None or self._arranged.count != len(self.rows):
            self._arranged = Rows(self.rows)
        return self._arranged.values()

    def evaluate(self, scalars: Sequence[Any]) -> list[float]:
        """The present value of each scalar: floats are kept, expressions are computed."""
        done = self.values()
        return [filled(scalar, done) for scalar in scalars]


class Scalars:
    """The lifted floats of a program: constants and expressions.

    Args:
        table: of the expressions.
        scalars: in the program's order.
    """

    def __init__(self, table: Table, scalars: Sequence[Any]):
        """Find their rows."""
        self._rows = [table.row_of(scalar) for scalar in scalars]
        self._arranged: tuple[Any, Any, np.ndarray] = (None, None, np.zeros(0, np.intp))
        self._last: tuple[Present | None, np.ndarray] = (None, np.zeros(0))

    def array(self, values: Present) -> np.ndarray:
        """Their present values, as the program takes them; the same array for the same values."""
        last, array = self._last
        if last is not values:
            distinct, index = self._distinct(values)
            array = np.array(distinct, np.float64).take(index)
            self._last = values, array
        return array

    def numbers(self, values: Present) -> list[Any]:
        """Their present values."""
        distinct, index = self._distinct(values)
        return [distinct[n] for n in index.tolist()]

    def _distinct(self, values: Present) -> tuple[Sequence[Any], np.ndarray]:
        """The values without repetitions, and for each scalar which of them it is."""
        where, select, index = self._arranged
        if where is not values.where:
            where = values.where
            indices = [where[row] for row in self._rows]
            chosen, index = np.unique(np.array(indices, np.intp), return_inverse=True)
            select = taking(tuple(chosen.tolist()))
            self._arranged = (where, select, index)
        return select(values.numbers), index


def filled(scalar: Any, values: Present) -> Any:
    """The value of an expression among those of its table; anything else is its own value."""
    return values[scalar.node.row] if isinstance(scalar, torch.SymFloat) else scalar


class SymbolicNode:
    """What torch calls on the node of a `SymFloat`.

    Attributes:
        table: where expressions are kept.
        row: this expression's number.
        value: its value during the capture.
        is_integer: whether it is an int outside of the capture, which torch promotes otherwise.
    """

    def __init__(self, table: Table, row: int, value: float, *, is_integer: bool = False):
        """See the class."""
        self.table = table
        self.row = row
        self.value = value
        self.is_integer = is_integer

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
        """It is no constant."""

    maybe_as_int = constant_int = constant_float = maybe_as_float

    def wrap_float(self, index: float) -> SymbolicNode:
        """A constant as an expression."""
        return SymbolicNode(self.table, self.table.constant(index), index)

    def wrap_int(self, index: int) -> SymbolicNode:
        """A constant as an expression."""
        return SymbolicNode(self.table, self.table.constant(index), index, is_integer=True)

    def guard_float(self, file: builtins.str, line: int) -> float:
        """Python reads the number itself."""
        if self.table.is_foreign():
            return float(self.value)
        raise CaptureError(_frozen(self.value, "converted to a Python float"))

    def guard_int(self, file: builtins.str, line: int) -> int:
        """Python reads the number itself."""
        if self.table.is_foreign():
            return int(self.value)
        raise CaptureError(_frozen(self.value, "converted to a Python int"))

    def __getattr__(self, name: builtins.str) -> Any:
        """Arithmetic and comparisons, by torch's names for them."""
        if name in _OPERATORS:
            return lambda *others: self.table.compute(_OPERATORS[name], (self, *others))
        if name in _COMPARISONS:
            return lambda other: Outcome(
                _COMPARISONS[name](self.value, other.value), self.value, self.table
            )
        raise AttributeError(name)

    def str(self) -> builtins.str:
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

    def expect_true(self, file: builtins.str, line: int) -> bool:
        """A check that raises if it fails: let it pass or fail now."""
        return self.holds

    def guard_bool(self, file: builtins.str, line: int) -> bool:
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

    def str(self) -> builtins.str:
        """For messages."""
        return f"{self.holds}"

    __str__ = __repr__ = _graph_repr = str


class SymbolicMath:
    """Context in which the functions of `math` also take symbols, as torch's `sym_sqrt` does.

    An optimizer computes `1 - math.pow(state["step"], -0.8)`. In C these functions take nothing but
    numbers, so those of the module are replaced; to other numbers and threads they are unchanged.

    >>> table = Table()
    >>> with SymbolicMath():
    ...     root = math.sqrt(table.symbol(lambda: 4.0, 4.0))
    >>> table.evaluate([root])
    [2.0]
    """

    _lock = threading.Lock()
    _depth = 0

    def __enter__(self) -> None:
        """Replace the functions."""
        with self._lock:
            SymbolicMath._depth += 1
            if SymbolicMath._depth == 1:
                for name, function in _MATH.items():
                    if getattr(math, name, None) is function:  # and not a user's
                        setattr(math, name, _SYMBOLIC[name])

    def __exit__(self, *exc: object) -> None:
        """Put them back, unless another capture needs them."""
        with self._lock:
            SymbolicMath._depth -= 1
            if SymbolicMath._depth == 0:
                for name, function in _MATH.items():
                    if getattr(math, name, None) is _SYMBOLIC[name]:
                        setattr(math, name, function)


_MATH: dict[str, Callable[..., float]] = {
    name: getattr(math, name)
    for name in (
        *("pow", "sqrt", "exp", "expm1", "log", "log1p", "log2", "log10", "fabs", "hypot"),
        *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh"),
    )
}


def _symbolic(function: Callable[..., float]) -> Callable[..., Any]:
    @functools.wraps(function)
    def with_symbols(*args: Any) -> Any:
        numbers = [settled(arg) for arg in args]
        nodes = [arg.node for arg in numbers if isinstance(arg, torch.SymFloat)]
        table = nodes[0].table if nodes and isinstance(nodes[0], SymbolicNode) else None
        if table is None:
            return function(*numbers)
        operands = [
            arg.node if isinstance(arg, torch.SymFloat) else nodes[0].wrap_float(float(arg))
            for arg in numbers
        ]
        return torch.SymFloat(table.compute(function, operands))

    return with_symbols


_SYMBOLIC = {name: _symbolic(function) for name, function in _MATH.items()}


def present(scalar: Any) -> float:
    """The value that a lifted float has now, whether it is a number or an expression."""
    return scalar.node.value if isinstance(scalar, torch.SymFloat) else scalar


def settled(value: Any) -> Any:
    """A number of a capture in another thread as that number; anything else as it is."""
    if isinstance(value, torch.SymFloat) and isinstance(value.node, SymbolicNode):
        return value.node.value if value.node.table.is_foreign() else value
    return value


def _frozen(value: float, how: str) -> str:
    return (
        f"{metrics.user_location()}: a number that changes from step to step (now {value}) is "
        f"{how} inside a compiled step, which would freeze it. Keep it in tensor arithmetic, use "
        "the optimizer's capturable form, or leave this part out of the compiled step."
    )
