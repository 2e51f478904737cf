"""The interface of an operator over rows: what its outputs read along each axis, and its kernel.

`window_operators` moves the rows and calls the kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

METHODS = ("auto", "windows", "xla")

Local = Callable[..., Any]  # (window, views, *operands) -> outputs; hashable


class Reach(Protocol):
    """What the outputs of an operator read along one axis. Hashable.

    Its methods take `rows`, the true size of the axis, and `o`, an array of output indices.
    """

    @property
    def native(self) -> bool:
        """Whether the compiler derives halos from what the local function does."""
        ...

    def outputs(self, rows: int) -> int:
        """How many outputs there are."""
        ...

    def reads(self, o: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """The first row that each output reads, and the one after the last."""
        ...

    def home(self, o: np.ndarray, rows: int) -> np.ndarray:
        """The row each output is nearest to; ascending."""
        ...

    def tables(self, o: np.ndarray, rows: int) -> tuple[np.ndarray, ...]:
        """Arrays of numbers, one entry per output, for the local function."""
        ...


@dataclasses.dataclass(frozen=True)
class View:
    """One axis of a window, for the local function.

    Attributes:
        start: the row of the global array that is the window's first; may be traced.
        outputs: how many outputs to compute.
        pads: fill values to imagine before and after the window.
        tables: those of the Reach, for these outputs.
    """

    start: Any
    outputs: int
    pads: tuple[int, int]
    tables: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Operator:
    """An operator over some axes of an array.

    Attributes:
        verb: its name, for messages.
        reaches: the axes, and what outputs read along them.
        local: computes outputs from a window.
        mode: the values of missing rows; one of `row_windows.MODES`.
        fill: the value, for mode "zero".
        method: one of `METHODS`.
        free: axes whose sharding is not that of the input (channels).
        per_group: of which form of `local` the gradient of what is read is taken on CPUs, and that
            of an operand; None for `local` as it is.
        operand_axis: which axis of the first operand the one free axis of outputs is; None for
            none.
        groups: of the one free axis, each of which reads and computes its own rows of axis 0 of the
            operand; `local` and its forms have a field of that name.
    """

    verb: str
    reaches: tuple[tuple[int, Reach], ...]
    local: Local
    mode: str = "zero"
    fill: float = 0
    method: str = "auto"
    free: tuple[int, ...] = ()
    per_group: tuple[Local | None, Local | None] = (None, None)
    operand_axis: int | None = None
    groups: int = 1

    def of_groups(self, groups: int) -> Operator:
        """The operator for some of its groups.

        Args:
            groups: how many.
        """
        if groups == self.groups:
            return self
        forms: list[Any] = [self.local, *self.per_group]
        local, *per_group = (form and dataclasses.replace(form, groups=groups) for form in forms)
        return dataclasses.replace(self, local=local, per_group=tuple(per_group), groups=groups)
