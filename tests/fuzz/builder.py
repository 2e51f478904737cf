"""Writing a random program, line by line, while it runs on the CPU.

What a line may say depends on the shapes and dtypes that the lines before it left, so each line
runs at once. Choices come from `draw`, which is hypothesis's: it replays them, and makes a program
smaller by making the choices smaller.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from . import refused, vocabulary
from .program import Line, Program, execute

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
MAX_ELEMENTS = 600
MAX_TENSORS = 10


class Unfit(Exception):
    """An operation has nothing to work on; the step is left out."""


@functools.lru_cache(None)
def _integers(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high)


class Builder:
    """A program in the making.

    Args:
        draw: takes a strategy and returns a value, as in `hypothesis.strategies.composite`.
        mesh: lay the tensors out on a mesh of this shape, or on one device where it is ().
        uneven: in blocks of any sizes.
        gradients: the floats require gradients.

    Attributes:
        scope: the program's variables on the CPU.
        lines: what was written so far.
    """

    def __init__(
        self,
        draw: Callable[[Any], Any],
        *,
        mesh: tuple[int, ...],
        gradients: bool,
        uneven: bool = False,
    ):
        """See the class."""
        self._draw = draw
        self.mesh = mesh
        self.uneven = uneven
        self.gradients = gradients
        self.lines: list[Line] = []
        self._restart()
        self._names = 0

    def _restart(self) -> None:
        self.scope = vocabulary.names("cpu")
        self._given = set(self.scope)

    def program(self) -> Program:
        """What was written."""
        return Program(tuple(self.lines))

    def integer(self, low: int, high: int) -> int:
        """A number from `low` to `high`."""
        return self._draw(_integers(low, high)) if low < high else low

    def one(self, items: Sequence[Any]) -> Any:
        """One of several; the first is the simplest."""
        if not items:
            raise Unfit
        return items[self.integer(0, len(items) - 1)]

    def chance(self, percent: int) -> bool:
        """True in so many of 100 cases."""
        return self.integer(0, 99) >= 100 - percent

    def seed(self) -> int:
        """For `data`."""
        return self.integer(0, 999)

    def tensors(self, fits: Callable[[torch.Tensor], bool] | None = None) -> list[str]:
        """Names of the live tensors that fit, newest last."""
        return [
            name
            for name, value in self.scope.items()
            if name not in self._given
            and isinstance(value, torch.Tensor)
            and (fits is None or _fits(fits, value))
        ]

    def tensor(self, fits: Callable[[torch.Tensor], bool] | None = None) -> str:
        """The name of one live tensor.

        Raises:
            Unfit: there is none.
        """
        return self.one(self.tensors(fits))

    def dim(self, tensor: torch.Tensor) -> int:
        """An axis, counted from either end; seldom one that is not there."""
        rank = max(tensor.dim(), 1)
        return self.integer(-rank, rank - 1) if not self.chance(2) else rank + 1

    def dtype(self) -> torch.dtype:
        """Half of them float32."""
        return torch.float32 if self.chance(50) else self.one(DTYPES)

    def shape(self) -> tuple[int, ...]:
        """Rank 0 to 4, few elements, seldom none."""
        rank = self.one((2, 1, 3, 2, 3, 4, 0))
        extents = (2, 3, 1, 4, 8, 2, 3, 4) if not self.chance(4) else (0, 2)
        if self.mesh:
            extents = (5, 3, 7, 4, 6, 2) if self.uneven else (8, 4, 2, 8, 4, 3)
        shape = tuple(self.one(extents) for _ in range(rank))
        return shape if torch.Size(shape).numel() <= MAX_ELEMENTS else shape[:2]

    def fresh(
        self, shape: Sequence[int], dtype: torch.dtype | None = None, *, special: bool = True
    ) -> str:
        """New numbers on the program's device, seldom NaN and inf."""
        dtype = dtype or self.dtype()
        kind = ""
        if dtype.is_floating_point or dtype.is_complex:
            pick = self.integer(0, 9)
            kind = ', "fine"' if pick in (6, 7, 8) else ""
            if pick == 9 and special and dtype.is_floating_point and not self.gradients:
                kind = ', "special"'
        elif dtype == torch.int64 and self.chance(20):
            kind = ', "whole"'
        made = f"data({self.seed()}, {tuple(shape)}, {dtype}{kind}).to(device)"
        if self.mesh and self.chance(60):
            return self._marked(made, tuple(shape))
        return made

    def after(self) -> None:
        """Follow a step."""

    def _marked(self, made: str, shape: tuple[int, ...]) -> str:
        mesh = self.mesh
        spec: list[str | None] = [None] * len(shape)
        sizes: list[tuple[int, ...] | None] = [None] * len(shape)
        for name, size in zip("xyz", mesh, strict=False):
            axes = [
                axis
                for axis, extent in enumerate(shape)
                if spec[axis] is None and extent and (self.uneven or extent % size == 0)
            ]
            if axes:
                axis = self.one(axes)
                spec[axis] = name
                sizes[axis] = self._sizes(shape[axis], size) if self.uneven else None
        blocks = f", {tuple(sizes)}" if any(sizes) else ""
        return f"mark({made}, {mesh}, {tuple(spec)}{blocks})"

    def _sizes(self, extent: int, blocks: int) -> tuple[int, ...]:
        """So many blocks of any sizes, some of them empty."""
        ends = sorted(self.integer(0, extent) for _ in range(blocks - 1))
        return tuple(end - start for start, end in itertools.pairwise((0, *ends, extent)))

    def number(self, *, floats: bool = True) -> str:
        """A Python number of any kind."""
        kind = self.integer(0, 9)
        if kind < 4 or not floats:
            return str(self.integer(-3, 4))
        if kind < 8:
            return str(self.one((0.5, 2.0, -1.5, 3.25, 0.0, -0.25)))
        if kind == 8:
            return str(self.one((True, False)))
        return self.one(("1.5", "(1+2j)", "float('inf')", "float('nan')"))

    def bind(self, expression: str) -> None:
        """Write `name = expression`."""
        if len(self.tensors()) >= MAX_TENSORS:
            raise Unfit
        name = "abcdefghijklmnopqrstuvw"[self._names % 23] + str(self._names // 23 or "")
        self._names += 1
        self.add(f"{name} = {expression}")

    def add(self, text: str) -> None:
        """Write a line, unless what it does is undefined, refused or too large."""
        try:
            execute(text, self.scope)
        except Exception as error:
            if refused.by_values(error):
                self._replay()
            else:
                self.lines.append(Line(text, type(error)))
            return
        made = [self.scope[name] for name in self.tensors()]
        left_out = [refused.unfit(t, MAX_ELEMENTS) for t in made]
        if any(left_out) or refused.undecided(text, made[-1]) or refused.bits_of_nan(made):
            self._replay()
        else:
            self.lines.append(Line(text))

    def _replay(self) -> None:
        """Undo a line by running those before it again."""
        self._restart()
        for line in self.lines:
            try:
                execute(line.text, self.scope)
            except Exception as error:
                if line.raises is None:
                    raise RuntimeError(f"{line.text} raises in a second run") from error


def _fits(fits: Callable[[torch.Tensor], bool], tensor: torch.Tensor) -> bool:
    """Whether a tensor fits; one that torch lets nobody look at does not.

    >>> first, second = torch.ones(2, requires_grad=True).mul(1).split(1)
    >>> _fits(lambda t: bool(t.isfinite().all()), first)
    True
    >>> with torch.no_grad():
    ...     _ = first.zero_()
    >>> _fits(lambda t: bool(t.isfinite().all()), first)
    False
    """
    try:
        return fits(tensor)
    except RuntimeError:
        return False
