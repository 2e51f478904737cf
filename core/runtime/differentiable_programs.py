"""What brings its own derivatives; `differentiable_calls` lets JAX call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Derivative(Protocol):
    """A program at some operands, with respect to those numbered `which`.

    Attributes:
        count: how many operands the program has.
        which: numbers of those that change.
        with_cotangent: numbers of the results with cotangents.
    """

    count: int
    which: tuple[int, ...]
    with_cotangent: Sequence[int]

    def forward(self, *operands: Any) -> tuple[list[Any], list[Any]]:
        """The results and the residuals."""
        ...

    def backward(
        self, operands: Sequence[Any], residuals: Sequence[Any], cotangents: Sequence[Any]
    ) -> list[Any]:
        """The cotangents of the operands `which`."""
        ...

    @property
    def vjp(self) -> Program:
        """The backward pass as a program of the operands and of the results' cotangents."""
        ...


class Program(Protocol):
    """A function of arrays that has its own derivatives."""

    def __call__(self, *operands: Any) -> list[Any]:
        """The results."""
        ...

    def linear(self, which: tuple[int, ...]) -> Derivative:
        """The program with respect to some operands."""
        ...

    def spread(self, index: int, tangent: Any) -> Any:
        """A tangent of an operand, in the shape that `Derivative.backward` gives its cotangents."""
        ...
